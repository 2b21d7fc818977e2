"""How a worker process ends badly: it says why, where its parent finds it, and leaves at once.

A worker whose own work failed is told apart from one that only lost its peer, so that the first
error is the one that is shown. Under `launch` the parent shows it; under `torchrun` the worker
prints it and fills in torch elastic's error file. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from leantune.errors import LeantuneError

REPORT_DIR = "LEANTUNE_REPORT_DIR"
PARENT_PID = "LEANTUNE_PARENT_PID"

_PEER_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|ncclRemoteError|remote process exit|communicator was aborted",
    re.IGNORECASE,
)
_PEER_LOST_TYPES = {"DistNetworkError", "DistStoreError"}
# torchrun blames the worker with the earliest time stamp, in whole seconds.
_YIELD_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Failure:
    """Why a worker ended. `own` is false if it only lost contact with another one; time: Unix seconds."""

    rank: int
    time: float
    message: str
    own: bool = True
    details: str = ""


def in_worker() -> bool:
    """Whether this process is one of several started by `launch` or `torchrun`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_peer_lost(error: BaseException) -> bool:
    """Whether the error says no more than that another rank has gone away."""
    if not isinstance(error, RuntimeError):
        # All errors of torch.distributed are RuntimeErrors; a BrokenPipeError may come from a closed stdout.
        return False
    return type(error).__name__ in _PEER_LOST_TYPES or _PEER_LOST.search(str(error)) is not None


@contextmanager
def worker_errors() -> Generator[None, None, None]:
    """Wrap all of a worker's work: an exception is reported, then the process exits non-zero at once.

    Outside a worker exceptions pass through. Also a decorator: `@worker_errors()`.
    """
    if not in_worker():
        yield
        return
    die_with_parent()
    try:
        yield
    except KeyboardInterrupt:
        _leave(128 + signal.SIGINT)
    except Exception as error:
        report_failure(error)


def report_failure(error: Exception) -> NoReturn:
    """Report the error of this worker and end the process with exit code 1.

    The process is not unwound any further, so that its connections break and the peers that wait
    for it in a collective fail too instead of hanging.
    """
    failure = _describe(error)
    directory = os.environ.get(REPORT_DIR)
    if directory:
        _write(Path(directory) / f"rank-{failure.rank}.json", asdict(failure))
        _leave(1)
    if not failure.own:
        time.sleep(_YIELD_SECONDS)
    print(f"rank {failure.rank}: {failure.message}{failure.details}", file=sys.stderr, flush=True)
    _write_elastic(failure)
    _leave(1)


def read_failures(directory: Path) -> dict[int, Failure]:
    """The reports that workers have left in the folder, by rank."""
    failures = [Failure(**json.loads(path.read_bytes())) for path in directory.glob("rank-*.json")]
    return {failure.rank: failure for failure in failures}


def die_with_parent() -> None:
    """Let the kernel end this worker when the launcher that started it is gone (Linux; else nothing)."""
    parent = os.environ.get(PARENT_PID)
    if not sys.platform.startswith("linux") or not (parent or "TORCHELASTIC_RUN_ID" in os.environ):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The launcher may have died before the call above took effect.
    if parent and os.getppid() != int(parent):
        _leave(1)


def _describe(error: Exception) -> Failure:
    rank = int(os.environ.get("RANK", "0"))
    now = time.time()
    if is_peer_lost(error):
        message = "lost contact with another rank, which failed or was stopped"
        return Failure(rank, now, message, own=False, details=f" ({_first_sentence(error)})")
    if isinstance(error, LeantuneError):
        return Failure(rank, now, str(error))
    trace = "".join(traceback.format_exception(error)).rstrip()
    return Failure(rank, now, f"{type(error).__name__}: {error}", details=f"\n\n{trace}")


def _first_sentence(error: Exception) -> str:
    """Torch adds advice to its messages; the fact comes first."""
    return next(iter(str(error).splitlines()), type(error).__name__).partition(". ")[0]


def _write_elastic(failure: Failure) -> None:
    """Fill in the file from which torchrun makes its own report of the failed workers."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        stamp = str(int(time.time()))
        info = {"py_callstack": failure.message + failure.details, "timestamp": stamp}
        _write(Path(path), {"message": {"message": failure.message, "extraInfo": info}})


def _write(path: Path, content: dict[str, object]) -> None:
    """Replace the file in one step; a folder that is gone means that nobody is there to read it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(path)
    except OSError:
        pass


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)
