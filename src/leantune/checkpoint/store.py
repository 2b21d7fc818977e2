"""Checkpoints of a run: `step-00000010/` folders that are complete, verified, and pruned to a number.

A checkpoint holds named tensors (`tensors.safetensors`) and plain values (`state.json`) that do
not depend on the number of processes. `best.json` names the best one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leantune.checkpoint import plain_json
from leantune.checkpoint.atomic import (
    check_folder,
    clean_stale,
    remove_folder,
    stale_entries,
    write_file,
    write_folder,
)
from leantune.checkpoint.compare import different_in_file, reading, refuse_different
from leantune.errors import CheckpointError

TENSORS = "tensors.safetensors"
STATE = "state.json"
BEST = "best.json"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back: tensors on the CPU by name, and plain values."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class CheckpointStore:
    """The checkpoints in one folder, of which the newest `keep` and the best one are kept.

    One process saves; all may read. `keep` is at least 1.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise CheckpointError(f"{keep} checkpoints cannot be kept; the least is 1")
        self.folder = Path(folder)
        self.keep = keep

    def save(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, best: bool = False
    ) -> Path:
        """Write `step-<step>/`, compare what is on disk with memory bit for bit, prune older ones.

        Raises `CheckpointError` if the disk refuses, or if what it holds is not what was in
        memory; the older checkpoints then stay as they were.
        """
        path = self.path_of(step)
        self.clean()
        on_cpu = _ready_to_write(tensors)
        plain = plain_json.encode(dict(state))

        def fill(folder: Path) -> None:
            _write_tensors(folder / TENSORS, on_cpu)
            (folder / STATE).write_bytes(plain)
            _compare(path, on_cpu, plain, folder)

        write_folder(path, fill)
        if best:
            self.mark_best(step)
        self._prune(path)
        return path

    def mark_best(self, step: int) -> None:
        """Let `best.json` name the checkpoint of this step."""
        path = self.path_of(step)
        write_file(self.folder / BEST, plain_json.encode({"checkpoint": path.name, "step": step}))

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        if step < 0:
            raise CheckpointError(f"a checkpoint cannot have the negative step {step}")
        return self.folder / f"step-{step:08d}"

    def clean(self) -> list[str]:
        """Clear away what a killed save left; returns one line for each. For the saving process only."""
        return clean_stale(self.folder)

    def steps(self) -> list[int]:
        """Steps that have a folder, complete or not, in ascending order."""
        if not self.folder.is_dir():
            return []
        matches = (_STEP_FOLDER.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint, and one line for every broken one that is newer.

        Reads only, so that all ranks may call it at once.
        """
        lines = [
            f"{place} was passed over: its save never finished ({path.name})"
            for path, kind, place in stale_entries(self.folder)
            if kind == "tmp" and _STEP_FOLDER.fullmatch(place.name)
        ]
        for step in reversed(self.steps()):
            try:
                return self.load(self.path_of(step)), lines
            except CheckpointError as error:
                lines.append(f"passed over: {error}")
        return None, lines

    def best(self) -> Checkpoint | None:
        """The best checkpoint, or None if none was marked; raises `CheckpointError` if it is broken."""
        path = self.best_path()
        return None if path is None else self.load(path)

    def best_path(self) -> Path | None:
        """The folder that `best.json` names, or None if there is no such file."""
        pointer = self.folder / BEST
        try:
            name: Any = plain_json.decode(pointer.read_bytes())["checkpoint"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{pointer} does not name a checkpoint: {error!r}; delete it") from error
        if not isinstance(name, str) or not _STEP_FOLDER.fullmatch(name):
            raise CheckpointError(f"{pointer} names {name!r}, which is not a checkpoint; delete it")
        return self.folder / name

    def load(self, path: Path) -> Checkpoint:
        """Read a checkpoint after checking every byte; raises `CheckpointError` naming what is wrong."""
        path = Path(path)
        match = _STEP_FOLDER.fullmatch(path.name)
        if match is None:
            raise CheckpointError(f"{path} is not a checkpoint; its name should be like step-00000010")
        reason = check_folder(path, deep=True)
        if reason is not None:
            raise CheckpointError(f"{path} is not complete: {reason}")
        tensors, state = _read(path)
        return Checkpoint(path, int(match[1]), tensors, state)

    def _prune(self, written: Path) -> None:
        """Keep the newest complete ones, the best one and the one just written; drop older ones."""
        complete = [step for step in self.steps() if check_folder(self.path_of(step)) is None]
        spared = {written, self.best_path(), *(self.path_of(step) for step in complete[-self.keep :])}
        newest_kept = complete[-1] if complete else -1
        for step in self.steps():
            path = self.path_of(step)
            # A broken folder that is newer than all complete ones is left for the user to see.
            if path not in spared and step <= newest_kept:
                remove_folder(path)


def _ready_to_write(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors, each with its own memory, as the file format demands; copies only if needed."""
    ready: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise CheckpointError(f"{TENSORS} cannot hold {name}: it is {tensor.layout}, not dense")
        value = tensor.detach().to("cpu").contiguous()
        storage = value.untyped_storage().data_ptr()
        ready[name] = value.clone() if storage in seen else value
        seen.add(storage)
    return ready


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, path)
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path.name} cannot hold these tensors: {error}") from error


def _compare(path: Path, tensors: dict[str, Tensor], plain: bytes, folder: Path) -> None:
    """Raise if what lies in `folder` differs from memory in a single bit."""
    different = different_in_file(folder / TENSORS, tensors)
    if (folder / STATE).read_bytes() != plain or plain_json.encode(plain_json.decode(plain)) != plain:
        different.append(STATE)
    refuse_different(path, different)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with reading(path):
        tensors = load_file(path / TENSORS)
        state: Any = plain_json.decode((path / STATE).read_bytes())
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE} is not a mapping")
    return tensors, cast("dict[str, Any]", state)
