"""What `output.overwrite` may remove: everything a run wrote in its folder, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import yaml

from leantune.checkpoint.atomic import MANIFEST, clean_stale, manifest_entries, remove_folder, stale_entries
from leantune.checkpoint.lock import RunLock
from leantune.errors import CheckpointError, ConfigError

CONFIG = "run.yaml"
CLAIM = "# a run of leantune that is about to start; its configuration follows\n"
_FILES = ("metrics.jsonl", "samples.md", "result.json", "data.json", "template.jinja")
_CHECKPOINT = re.compile(r"step-\d{8,}|best\.json")
_CHECKPOINT_FILES = {"tensors.safetensors", "state.json", MANIFEST}
_RECORDS = {"train.safetensors", "validation.safetensors"}
_PREFIX_FILE = re.compile(r"[0-9a-f]{32}\.safetensors")
_EVENT_FILE = "events.out.tfevents."


def make_room(path: Path, overwrite: bool) -> None:
    """Remove the run in a non-empty folder, if that was asked for and nothing of others would be lost.

    Files beside those of the run stay. Raises `ConfigError` naming the folder and the fixes, and
    `CheckpointError` if a process works on the run.
    """
    if not _is_run(path / CONFIG):
        names = ", ".join(sorted(item.name for item in path.iterdir())[:5])
        raise ConfigError(
            f"output.dir: {path} is not empty and holds no run (it holds {names}); choose another output.dir "
            "or empty it (`leantune resume DIR` and output.overwrite=true need a folder with a run)"
        )
    if not overwrite:
        raise ConfigError(
            f"output.dir: {path} already holds a run; choose another output.dir, continue it with "
            f"`leantune resume {path}`, or replace it with output.overwrite=true"
        )
    lock = RunLock(path)
    lock.take()
    try:
        _remove_run(path)
    finally:
        lock.release()


def _remove_run(path: Path) -> None:
    clean_stale(path)
    clean_stale(path / "checkpoints")
    strangers = [str(item.relative_to(path)) for item in _strangers(path)]
    if strangers:
        raise ConfigError(
            f"output.overwrite: {path} holds files that no run wrote and that would be lost: "
            f"{', '.join(strangers[:5])}; move them away, or choose another output.dir"
        )
    for name in ("adapter", "model", "checkpoints", "records", "tensorboard", "prefix"):
        if (path / name).exists():
            remove_folder(path / name)
    # run.yaml goes last: until then a killed replacement is still a run and can be replaced again.
    for name in (*_FILES, CONFIG):
        (path / name).unlink(missing_ok=True)


def _is_run(config: Path) -> bool:
    """Whether this run.yaml is leantune's: a claim without content yet, or a configuration."""
    if not config.is_file():
        return False
    try:
        tree: Any = yaml.safe_load(config.read_bytes())
    except yaml.YAMLError:
        return False
    if isinstance(tree, dict):
        return {"model", "data"} <= cast("dict[str, Any]", tree).keys()
    return tree is None


def _strangers(path: Path) -> Iterator[Path]:
    """Files inside the folders of a run that leantune did not write."""
    for folder in (path / "adapter", path / "model"):
        yield from _unlisted(folder)
    for item in _items(path / "checkpoints"):
        if not _CHECKPOINT.fullmatch(item.name):
            yield item
        elif item.name != "best.json":
            yield from (file for file in _items(item) if file.name not in _CHECKPOINT_FILES)
    yield from (item for item in _items(path / "records") if item.name not in _RECORDS)
    for item in _items(path / "prefix"):
        yield from (file for file in _items(item) if not _PREFIX_FILE.fullmatch(file.name))
    yield from (item for item in _items(path / "tensorboard") if not item.name.startswith(_EVENT_FILE))


def _unlisted(folder: Path) -> Iterator[Path]:
    """Files of a saved folder that its manifest does not list; without one, all of them."""
    if folder.is_symlink() or not folder.is_dir():
        yield from [folder] if folder.is_symlink() or folder.exists() else []
        return
    try:
        listed = {MANIFEST, *manifest_entries(folder)}
    except CheckpointError:
        listed = set[str]()
    for item in sorted(folder.rglob("*")):
        if not item.is_dir() and item.relative_to(folder).as_posix() not in listed:
            yield item


def _items(folder: Path) -> list[Path]:
    """What lies in a folder; a link or file in its place counts as lying in it."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return [folder]
    in_flight = {path for path, _, _ in stale_entries(folder)}
    return sorted(item for item in folder.iterdir() if item not in in_flight) if folder.exists() else []
