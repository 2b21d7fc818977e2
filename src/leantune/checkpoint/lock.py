"""One process at a time works on a run: a lock that the kernel drops when its owner dies."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from leantune.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

LOCK = ".lock"


class RunLock:
    """The right to write into a run folder. Where the file system knows no locks, everybody has it.

    The file goes when the lock is released; one that a killed process left means nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._descriptor: int | None = None

    def take(self) -> None:
        """Take the lock; raises `CheckpointError` naming the process that has it."""
        if self._descriptor is None:
            self._descriptor = _lock(self._path)

    def release(self) -> None:
        """Give the lock back, if it was taken."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Take the lock and keep it, unless this block fails."""
        self.take()
        try:
            yield
        except BaseException:
            self.release()
            raise


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock; None if there can be none here."""
    while fcntl is not None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:
            return None  # the first file that the run writes will say what is wrong
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # An owner that ended just now has removed the file between our two calls.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.truncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()} on {platform.node()}".encode())
                return descriptor
        except BlockingIOError:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace")
            os.close(descriptor)
            raise CheckpointError(
                f"{path.parent} is in use by process {owner or '(unknown)'}; wait for its end, or stop it"
            ) from None
        except FileNotFoundError:
            pass
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            return None
        os.close(descriptor)
    return None
