"""Folders that are wholly there or not there: kills, full disks, truncated files, missing markers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from leantune.checkpoint import atomic
from leantune.checkpoint.atomic import (
    MANIFEST,
    check_folder,
    clean_stale,
    remove_folder,
    write_file,
    write_folder,
)
from leantune.errors import CheckpointError

DEAD = 2**22 + 5  # above the largest process number that Linux gives out


def filler(text: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "weights.bin").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "more.txt").write_text("more")

    return fill


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_complete_and_lists_its_files(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    write_folder(target, filler("abc"))
    assert check_folder(target, deep=True) is None
    manifest = json.loads((target / MANIFEST).read_text())
    assert manifest["format_version"] == 1
    assert manifest["files"]["weights.bin"]["size"] == 3
    assert set(manifest["files"]) == {"weights.bin", "sub/more.txt"}
    assert names(target.parent) == ["target"]


def test_replacing_leaves_no_file_of_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_folder(target, lambda folder: (folder / "old.txt").write_text("old") and None)
    write_folder(target, filler("new"))
    assert names(target) == [MANIFEST, "sub", "weights.bin"]
    assert names(tmp_path) == ["target"]


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt()])
def test_a_fill_that_raises_leaves_the_target_as_it_was(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "target"
    write_folder(target, filler("first"))

    def fill(folder: Path) -> None:
        (folder / "weights.bin").write_text("half")
        raise error

    with pytest.raises(type(error)):
        write_folder(target, fill)
    assert (target / "weights.bin").read_text() == "first"
    assert check_folder(target, deep=True) is None
    assert names(tmp_path) == ["target"]


def test_a_failed_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    write_folder(target, filler("first"))
    real = os.rename

    def rename(source: Path, goal: Path) -> None:
        if Path(source).name.startswith(".tmp-"):
            raise OSError(errno.EIO, "Input/output error")
        real(source, goal)

    monkeypatch.setattr(atomic.os, "rename", rename)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_folder(target, filler("second"))
    assert (target / "weights.bin").read_text() == "first"
    assert names(tmp_path) == ["target"]


def test_a_full_disk_is_named_with_the_path_and_the_fix(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(
        CheckpointError, match=r"cannot write .*target: No space left on device; free some space"
    ):
        write_folder(tmp_path / "target", fill)
    assert names(tmp_path) == []


def test_a_file_in_the_place_of_the_folder_is_not_deleted(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    with pytest.raises(CheckpointError, match="a file is in its place"):
        write_folder(target, filler("x"))
    assert target.read_text() == "mine"
    with pytest.raises(CheckpointError, match=r"cannot write .*target/below"):
        write_folder(target / "below", filler("x"))


def test_a_link_would_not_be_saved_with_the_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("x")
    with pytest.raises(CheckpointError, match="a link cannot be part"):
        write_folder(tmp_path / "target", lambda folder: (folder / "a").symlink_to(tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    ("damage", "deep", "reason"),
    [
        (lambda t: (t / "weights.bin").write_text("ab"), False, "weights.bin is truncated: 2 of 5 bytes"),
        (lambda t: (t / "weights.bin").write_text("abcdefg"), False, "weights.bin is too long: 7 of 5 bytes"),
        (lambda t: (t / "weights.bin").write_text("abXde"), True, "weights.bin has changed"),
        (lambda t: (t / "sub" / "more.txt").unlink(), False, "sub/more.txt is missing"),
        (lambda t: (t / MANIFEST).unlink(), False, "completion marker manifest.json is missing"),
        (lambda t: (t / MANIFEST).write_text('{"format_ver'), False, "manifest.json is not valid JSON"),
        (lambda t: (t / MANIFEST).write_text("[]"), False, "format version None"),
        (lambda t: (t / MANIFEST).write_text('{"format_version": 2}'), False, "format version 2"),
        (lambda t: (t / MANIFEST).write_text('{"format_version": 1, "files": [1]}'), False, "does not list"),
        (shutil.rmtree, False, "the folder is missing"),
    ],
)
def test_every_kind_of_damage_is_told(
    tmp_path: Path, damage: Callable[[Path], object], deep: bool, reason: str
) -> None:
    target = tmp_path / "target"
    write_folder(target, filler("abcde"))
    damage(target)
    found = check_folder(target, deep=deep)
    assert found is not None
    assert reason in found


def test_a_changed_byte_needs_the_deep_check(tmp_path: Path) -> None:
    write_folder(tmp_path / "target", filler("abcde"))
    (tmp_path / "target" / "weights.bin").write_text("abXde")
    assert check_folder(tmp_path / "target") is None


KILLED = """
import os, sys
from pathlib import Path
from leantune.checkpoint.atomic import write_folder

def fill(folder):
    (folder / "weights.bin").write_text("half")
    os.kill(os.getpid(), 9)

write_folder(Path(sys.argv[1]), fill)
"""


def test_a_process_killed_while_filling_leaves_the_old_folder_and_a_stale_one(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_folder(target, filler("first"))
    ended = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert check_folder(target, deep=True) is None
    assert len(names(tmp_path)) == 2
    lines = clean_stale(tmp_path)
    assert len(lines) == 1
    assert "target: removed .tmp-target-" in lines[0]
    assert names(tmp_path) == ["target"]


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path: Path) -> None:
    write_folder(tmp_path / "target", filler("first"))
    os.rename(tmp_path / "target", tmp_path / f".old-target-{DEAD}-0123abcd")
    (tmp_path / f".tmp-target-{DEAD}-0123abcd").mkdir()
    lines = clean_stale(tmp_path)
    assert any("put back" in line for line in lines)
    assert (tmp_path / "target" / "weights.bin").read_text() == "first"
    assert names(tmp_path) == ["target"]


def test_cleaning_spares_running_processes_and_files_of_others(tmp_path: Path) -> None:
    running = tmp_path / f".tmp-target-{os.getppid()}-0123abcd"
    running.mkdir()
    (tmp_path / ".tmp-notes").write_text("mine")
    (tmp_path / ".old-thing-x-y").write_text("mine")
    # Left by an earlier process that had our number, as happens in containers.
    (tmp_path / f".del-target-{os.getpid()}-0123abcd").mkdir()
    assert clean_stale(tmp_path) == []
    assert names(tmp_path) == sorted([running.name, ".tmp-notes", ".old-thing-x-y"])


def test_cleaning_inside_a_save_spares_that_save(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "a").write_text("a")
        assert clean_stale(tmp_path) == []

    write_folder(tmp_path / "target", fill)
    assert check_folder(tmp_path / "target", deep=True) is None


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sub" / "a.json"
    write_file(path, b"one")
    write_file(path, b"two")
    assert path.read_bytes() == b"two"

    def fsync(_descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(atomic.os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"a\.json: Disk quota exceeded; free some space"):
        write_file(path, b"three")
    assert path.read_bytes() == b"two"
    assert names(path.parent) == ["a.json"]


def test_a_removed_folder_is_gone(tmp_path: Path) -> None:
    write_folder(tmp_path / "target", filler("x"))
    remove_folder(tmp_path / "target")
    assert names(tmp_path) == []
    with pytest.raises(CheckpointError, match="cannot delete"):
        remove_folder(tmp_path / "target")
