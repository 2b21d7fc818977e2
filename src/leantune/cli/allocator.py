"""Sets glibc's allocator up for training on a CPU, where freed activations should be reused in place."""

from __future__ import annotations

import ctypes
import os
import sys

_TUNABLES = "GLIBC_TUNABLES"
_NO_THREAD_CACHE = "glibc.malloc.tcache_count=0"
_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_MAX = 1, -1, -4
_NEVER = 2**31 - 1


def tune_allocator() -> None:
    """Keep large freed blocks in the heap, and let the holes they leave be used again whole.

    Left alone, glibc maps and unmaps large blocks, so that the kernel zeroes the memory of every
    activation anew, and the splinters of its aligned requests stay in small caches between them,
    so that a hole never fits the next request of its own size. Without these caches the
    holes join up. `benchmarks/allocator.py` measures both. The thread cache can be switched off only
    when a process starts, so this one starts itself again, once. Does nothing without glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    mallopt(_M_MXFAST, 0)
    present = os.environ.get(_TUNABLES, "")
    if "tcache_count" not in present and len(sys.orig_argv) > 1:
        os.environ[_TUNABLES] = f"{present}:{_NO_THREAD_CACHE}" if present else _NO_THREAD_CACHE
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
