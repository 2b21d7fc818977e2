"""What a run costs: tokens per second, time left, peak memory."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_GIB = 1024**3
_STATUS = Path("/proc/self/status")
_CGROUP = Path("/sys/fs/cgroup")
_baseline_bytes = 0


class Throughput:
    """Speed of training alone: it is told the seconds of each step, so evaluation and saving do not count.

    `window` is the number of recent steps over which the speed is smoothed.
    """

    def __init__(self, window: int = 20) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=window)

    def step(self, tokens: int, seconds: float) -> None:
        """Count a step that took in so many tokens on all ranks in so many seconds."""
        self._recent.append((tokens, seconds))

    @property
    def tokens_per_second(self) -> float:
        """Over the recent steps; 0 before the first one."""
        seconds = sum(seconds for _, seconds in self._recent)
        return sum(tokens for tokens, _ in self._recent) / seconds if seconds > 0 else 0.0

    def seconds_left(self, steps_left: int) -> float | None:
        """Training time of so many more steps at the recent speed; None before the first step."""
        if not self._recent:
            return None
        return steps_left * sum(seconds for _, seconds in self._recent) / len(self._recent)


def memory_baseline() -> float:
    """Take the memory in use now (libraries) as the zero of `peak_memory_gib` on a CPU; returns GiB.

    Call it after the imports and before the model is loaded.
    """
    global _baseline_bytes
    # Linux lets a process set its own peak back to its present size, so that a peak
    # during the imports does not count; where it does not, the peak so far is the zero.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    _baseline_bytes = _peak_bytes()
    return _baseline_bytes / _GIB


def peak_memory_gib(device: torch.device | str) -> float:
    """Largest memory used so far, in GiB: CUDA's allocated tensors, or the process's size above the baseline.

    On a CPU the pages of mapped files (a checkpoint being read) count too.
    """
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device) / _GIB
    return max(_peak_bytes() - _baseline_bytes, 0) / _GIB


def available_memory() -> int:
    """Bytes of host memory that this process could still get, as far as the system tells."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # the container's own limit, "max" if it has none
        limit, used = ((_CGROUP / name).read_text() for name in ("memory.max", "memory.current"))
        found.append(max(0, int(limit) - int(used)))
    return min(found)


def _peak_bytes() -> int:
    """Peak resident size of this process: VmHWM on Linux, else what getrusage knows."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
