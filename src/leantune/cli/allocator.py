"""Tells glibc's allocator what training on a CPU needs: large blocks given back when they are freed."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BLOCK = 4 * 2**20
_KEPT_HEAP = 256 * 2**20


def tune_allocator() -> bool:
    """Serve blocks of 4 MiB and more from mappings of their own; keep the heap of smaller ones.

    Left alone, glibc soon serves blocks up to 32 MiB from its heap, where the holes that freed
    activations leave are too small for the next aligned request of the same size: the process
    grows to half as much again as what is alive. The price is that the kernel zeroes such
    blocks anew; docs/log.md has both figures. Does nothing where the C library is not glibc.
    Returns whether it took effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_HEAP))
