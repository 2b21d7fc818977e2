"""Keeps freed host memory with the process, so that each step does not ask the kernel for it anew."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc to serve large blocks from its heap and never to give the heap back.

    By default every activation of some megabytes is mapped, zeroed and unmapped by the
    kernel in each step; `benchmarks/allocator.py` measures what that costs. Does nothing
    where the C library is not glibc. Returns whether it took effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
