"""Files and folders that are either wholly there or not there at all, even after a kill or a power cut.

A folder is filled under a temporary name beside its target, gets `manifest.json` as its
completion marker last, and is renamed into place. Three prefixes mark what is in flight:
`.tmp-` is being filled, `.old-` was moved aside by a replacement, `.del-` is being deleted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError

from leantune.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_IN_FLIGHT = re.compile(r"\.(?P<kind>tmp|old|del)-(?P<name>.+)-(?P<process>\d+)-[0-9a-f]{8}")
# Process numbers repeat (every container starts at 1): a leftover with our own number is only
# in use if this very process made it.
_in_use: set[str] = set()


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Create or replace the folder `target` in one step with what `fill(folder)` writes.

    Whatever `fill` raises is passed on; then, and on `CheckpointError` for a full disk or a
    missing permission, `target` is what it was before.
    """
    target = Path(target)
    with _disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(target, ".tmp-")
        _in_use.add(temporary.name)
        try:
            temporary.mkdir()
            fill(temporary)
            _write_manifest(temporary)
            _replace_folder(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            _in_use.discard(temporary.name)


def write_file(path: Path, data: bytes) -> None:
    """Create or replace a file in one step; raises `CheckpointError` if the disk refuses."""
    path = Path(path)
    with _disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(path, ".tmp-")
        _in_use.add(temporary.name)
        try:
            _write_synced(temporary, data)
            os.replace(temporary, path)
            _sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
            _in_use.discard(temporary.name)


def remove_folder(path: Path) -> None:
    """Delete a folder so that a kill half-way leaves no folder that looks broken."""
    with _disk_errors(path, "delete"):
        doomed = _beside(path, ".del-")
        _in_use.add(doomed.name)
        try:
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        finally:
            _in_use.discard(doomed.name)


def check_folder(path: Path, deep: bool = False) -> str | None:
    """Why a folder is not what `write_folder` left, or None if it is complete.

    Compares names and sizes with the manifest; `deep` also compares the contents (sha256).
    """
    path = Path(path)
    if not path.is_dir():
        return "the folder is missing"
    try:
        entries = manifest_entries(path)
    except CheckpointError as error:
        return str(error)
    for name, entry in entries.items():
        reason = _check_file(path / name, name, entry, deep)
        if reason is not None:
            return reason
    return None


def manifest_entries(path: Path) -> dict[str, dict[str, Any]]:
    """`size` (bytes) and `sha256` of each file of a complete folder, by its relative name.

    Raises `CheckpointError`, with the reason alone, if the marker is missing or unreadable.
    """
    try:
        manifest: Any = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"its completion marker {MANIFEST} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror or error}") from error
    except ValueError:
        raise CheckpointError(f"{MANIFEST} is not valid JSON") from None
    version = cast("dict[str, Any]", manifest).get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{MANIFEST} has format version {version!r}; this version of leantune reads {FORMAT_VERSION}"
        )
    entries = cast("dict[str, Any]", manifest).get("files")
    if not isinstance(entries, dict) or not all(map(_is_entry, cast("dict[str, Any]", entries).values())):
        raise CheckpointError(f"{MANIFEST} does not list files with their size and sha256")
    return cast("dict[str, dict[str, Any]]", entries)


def clean_stale(parent: Path) -> list[str]:
    """Remove what dead processes left half-done in `parent`; returns one line for each.

    A folder that a replacement had moved aside is put back if its place is still empty.
    Only the one process that writes into `parent` may call this.
    """
    lines: list[str] = []
    for path, kind, place in stale_entries(parent):
        with _disk_errors(path, "clean up"):
            if kind == "old" and not place.exists():
                os.rename(path, place)
                lines.append(f"{place}: put back after an interrupted replacement")
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            if kind == "tmp":
                lines.append(f"{place}: removed {path.name}, a save that never finished")
    return lines


def stale_entries(parent: Path) -> list[tuple[Path, str, Path]]:
    """What dead processes left half-done in `parent`: path, kind (tmp, old, del) and intended place."""
    if not parent.is_dir():
        return []
    found: list[tuple[Path, str, Path]] = []
    # In this order a folder moved aside is put back before its half-done replacement is looked at.
    for path in sorted(parent.iterdir()):
        match = _IN_FLIGHT.fullmatch(path.name)
        if match and path.name not in _in_use and not _another_is_alive(int(match["process"])):
            found.append((path, match["kind"], parent / match["name"]))
    return found


def _beside(target: Path, prefix: str) -> Path:
    return target.parent / f"{prefix}{target.name}-{os.getpid()}-{secrets.token_hex(4)}"


def _another_is_alive(process: int) -> bool:
    """Whether another process has this number now (and may still be at work)."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _write_manifest(folder: Path) -> None:
    """Sync every file and sub-folder, then write the marker that says so."""
    if (folder / MANIFEST).exists():
        raise CheckpointError(f"{MANIFEST} is the completion marker and must not be written by a fill")
    entries: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise CheckpointError(f"{path}: a link cannot be part of a saved folder; write the file itself")
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            entries[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": digest}
        _sync(path)
    text = json.dumps({"format_version": FORMAT_VERSION, "files": entries}, indent=2)
    _write_synced(folder / MANIFEST, f"{text}\n".encode())
    _sync(folder)


def _replace_folder(temporary: Path, target: Path) -> None:
    """Rename into place. POSIX cannot swap two folders, so an old one is moved aside first."""
    aside: Path | None = None
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file is in its place")
    if target.exists():
        aside = _beside(target, ".old-")
        _in_use.add(aside.name)
        os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except BaseException:
        if aside is not None and not target.exists():
            os.rename(aside, target)
        raise
    finally:
        _sync(target.parent)
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
            _in_use.discard(aside.name)


def _check_file(path: Path, name: str, entry: dict[str, Any], deep: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            how = f"truncated: {size}" if size < entry["size"] else f"too long: {size}"
            return f"{name} is {how} of {entry['size']} bytes"
        if deep:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    return f"{name} has changed since it was written (its sha256 differs from {MANIFEST})"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return None


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    fields = cast("dict[str, Any]", entry)
    return isinstance(fields.get("size"), int) and isinstance(fields.get("sha256"), str)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Push a file or folder to the disk; some network file systems cannot sync a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _disk_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Turn the errors of a disk into one `CheckpointError` that names the path and the fix."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else None
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        fix = {
            errno.ENOSPC: "; free some space, or choose an output.dir on another disk",
            errno.EDQUOT: "; free some space, or choose an output.dir on another disk",
            errno.EACCES: "; make the folder writable, or choose another output.dir",
            errno.EROFS: "; choose an output.dir on a disk that can be written",
        }.get(number or 0, "")
        raise CheckpointError(f"cannot {action} {path}: {reason}{fix}") from error
