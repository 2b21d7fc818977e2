"""A run belongs to one process, and to nobody once that process is dead."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from leantune.checkpoint import lock
from leantune.checkpoint.lock import LOCK, RunLock
from leantune.checkpoint.run_folder import RunFolder
from leantune.errors import CheckpointError

pytestmark = pytest.mark.skipif(lock.fcntl is None, reason="needs flock")


def test_a_second_owner_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    """Two processes wrote into one run."""
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.take()
    first.take()
    with pytest.raises(CheckpointError, match=rf"in use by process {os.getpid()} on .*; wait for its end"):
        second.take()
    second.release()  # it has none, so it may not take the first one's away
    with pytest.raises(CheckpointError):
        second.take()
    first.release()
    assert not list(tmp_path.iterdir())
    second.take()
    second.release()


def test_a_lock_outlives_its_block_only_if_that_succeeds(tmp_path: Path) -> None:
    """A run that failed to start kept its folder locked for the rest of a notebook."""
    owner = RunLock(tmp_path)
    with pytest.raises(ZeroDivisionError), owner.kept():
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with owner.kept():
        pass
    with pytest.raises(CheckpointError):
        RunLock(tmp_path).take()
    owner.release()


def _take_and_die(folder: Path) -> None:
    RunLock(folder).take()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    """A run that was killed could not be resumed before somebody deleted a file."""
    process = multiprocessing.get_context("fork").Process(target=_take_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert (tmp_path / LOCK).exists()
    owner = RunLock(tmp_path)
    owner.take()
    assert (tmp_path / LOCK).read_text().startswith(f"{os.getpid()} on ")
    owner.release()


def test_a_file_that_its_owner_removed_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes held a lock, one of them on a file that was no longer there."""
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.take()
    assert lock.fcntl is not None
    real = lock.fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        first.release()
        real(descriptor, operation)

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    second.take()
    monkeypatch.undo()
    with pytest.raises(CheckpointError):
        first.take()
    second.release()


def test_a_file_system_without_locks_refuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network disk without locks could hold no run."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    assert lock.fcntl is not None
    monkeypatch.setattr(lock.fcntl, "flock", flock)
    owner = RunLock(tmp_path)
    owner.take()
    owner.release()
    assert not list(tmp_path.iterdir())


def test_an_abandoned_lock_file_does_not_make_a_folder_somebodys(tmp_path: Path) -> None:
    """A folder whose visible files had been removed counted as one that holds other things."""
    (tmp_path / LOCK).write_text("1 on elsewhere")
    assert RunFolder.create(str(tmp_path), "x", False).config.is_file()
