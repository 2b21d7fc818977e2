"""The folder of a run: who may write into it, what lies where, and how small files are replaced.

run.yaml       the configuration; a folder without it is no run
metrics.jsonl  one row per step and per evaluation
data.json      facts about the records        adapter/ or model/  what was trained
checkpoints/   resumable states               samples.md          generated answers
tensorboard/   event files, if asked for      result.json         the final numbers
prefix/        what train.cache_frozen_prefix: disk keeps while the run goes on
records/       the encoded records           template.jinja      the user's own template, if any
.lock          while a process works on it
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from leantune.checkpoint import plain_json
from leantune.checkpoint.atomic import write_file
from leantune.checkpoint.lock import LOCK, RunLock
from leantune.checkpoint.replace_run import CLAIM, CONFIG, make_room
from leantune.errors import CheckpointError, ConfigError

# A run has at least one of these beside its configuration.
_MARKS = ("records", "metrics.jsonl", "adapter", "result.json")


class RunFolder:
    """The paths of a run, and the small files in it. Make one with `create` or `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG
        self.metrics = path / "metrics.jsonl"
        self.adapter = path / "adapter"
        self.model = path / "model"
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples.md"
        self.result = path / "result.json"
        self.data = path / "data.json"
        self.records = path / "records"
        self.tensorboard = path / "tensorboard"
        self.prefix = path / "prefix"
        self.template = path / "template.jinja"
        self.lock = RunLock(path)

    @classmethod
    def create(cls, dir: str | None, default_name: str, overwrite: bool) -> RunFolder:
        """Make and claim the folder of a new run; two runs started at once never get the same one.

        Without `dir` it is `runs/<default_name>`, with -2, -3, ... behind it if that exists (with
        `overwrite`, the run there is replaced instead). An explicit `dir` must be new or empty, or
        hold a run and `overwrite` be set. Files that no run writes are never deleted.
        Raises `ConfigError` naming the folder and the fixes, or `CheckpointError` if the run to be
        replaced is still being worked on.
        """
        path = Path("runs") / (Path(default_name).name or "run")
        if dir is not None:
            path = Path(dir).expanduser()
        try:
            if dir is None and not overwrite:
                return cls._create_numbered(path)
            path.mkdir(parents=True, exist_ok=True)
            if any(item.name != LOCK for item in path.iterdir()):
                make_room(path, overwrite)
            return cls._claim(path)
        except FileExistsError as error:
            # Either a file is in the way, or another run has put its run.yaml there just now.
            taken = "was taken by another run just now" if path.is_dir() else f"{error.filename} is a file"
            raise ConfigError(f"output.dir: {path}: {taken}; choose another output.dir") from error
        except OSError as error:
            reason = f"{error.strerror or error}; choose another output.dir"
            raise ConfigError(f"output.dir: cannot use {path}: {reason}") from error

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run; raises `CheckpointError` with the runs nearby if there is none in `path`."""
        path = Path(path).expanduser()
        if _is_run(path):
            return cls(path)
        raise CheckpointError(f"{path} is not a run: {_why_not(path)}{_hint(path)}")

    def discard_unused(self) -> None:
        """Remove a run whose training never began, so that its place is free again; keeps other files."""
        self.lock.release()
        if self.metrics.exists():
            return
        with contextlib.suppress(ConfigError, CheckpointError, OSError):
            make_room(self.path, overwrite=True)
            self.path.rmdir()

    def write_config(self, text: str) -> None:
        """Write run.yaml in one step."""
        write_file(self.config, text.encode())

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Replace a JSON file of the run in one step; NaN and infinity survive `read_json`."""
        write_file(self.path / name, plain_json.encode(values))

    def read_json(self, name: str) -> dict[str, Any]:
        """What `write_json` wrote; raises `CheckpointError` if it is missing or broken."""
        path = self.path / name
        try:
            values: Any = plain_json.decode(path.read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} must hold a JSON object, but holds {values!r:.80}")
        return cast("dict[str, Any]", values)

    def truncate_metrics(self, step: int) -> int:
        """Drop the rows of later steps (of a run that goes on from an older checkpoint) in one step.

        A half-written last line goes too. Returns the number of rows dropped; raises
        `CheckpointError` naming the line if another one is not JSON.
        """
        if not self.metrics.exists():
            return 0
        lines = complete_lines(self.metrics.read_bytes()).splitlines(keepends=True)
        kept = [line for number, line in enumerate(lines, 1) if _step_of(line, self.metrics, number) <= step]
        write_file(self.metrics, b"".join(kept))
        return len(lines) - len(kept)

    @classmethod
    def _create_numbered(cls, first: Path) -> RunFolder:
        first.parent.mkdir(parents=True, exist_ok=True)
        number, path = 1, first
        while True:
            try:
                path.mkdir()
                return cls._claim(path)
            except FileExistsError:
                number += 1
                path = first.with_name(f"{first.name}-{number}")

    @classmethod
    def _claim(cls, path: Path) -> RunFolder:
        """Mark an empty folder as this run's; raises `FileExistsError` if another was faster."""
        with (path / CONFIG).open("x", encoding="utf-8") as file:
            file.write(CLAIM)
        return cls(path)


def complete_lines(data: bytes) -> bytes:
    """Lines of JSON without a half-written last one, ending in a newline.

    A process killed while it appends leaves a part of a row, or a whole one without its newline.
    """
    head, newline, tail = data.removesuffix(b"\n").rpartition(b"\n")
    if _is_row(tail):
        return head + newline + tail + b"\n"
    return head + newline


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _step_of(line: bytes, path: Path, number: int) -> int:
    """The step of a row; a row without one belongs to the start."""
    if not _is_row(line):
        raise CheckpointError(f"{path}, line {number} is not a JSON object: {line[:60]!r}; delete that line")
    step = json.loads(line).get("step", 0)
    if not isinstance(step, int):
        raise CheckpointError(f"{path}, line {number}: step is {step!r}, which is no whole number")
    return step


def _is_run(path: Path) -> bool:
    """Whether this is a run, and not just a folder in which somebody keeps a run.yaml of his own."""
    return (path / CONFIG).is_file() and any((path / mark).exists() for mark in _MARKS)


def _why_not(path: Path) -> str:
    if not path.exists():
        return "it does not exist"
    if not path.is_dir():
        return "it is not a folder"
    if not (path / CONFIG).is_file():
        return f"it has no {CONFIG}"
    if (path / CONFIG).read_bytes() == CLAIM.encode():
        return "it ended before its data was prepared; train again with output.overwrite=true"
    return f"it has a {CONFIG}, but nothing that a run writes"


def _hint(path: Path) -> str:
    """The runs that may have been meant: above, below, or beside the path."""
    for parent in path.absolute().parents:
        if _is_run(parent):
            return f"; did you mean {parent}?"
    if path.is_dir():
        below = _runs_in(path)
        return f"; did you mean one of these: {_listed(below)}?" if below else ""
    runs = {run.name: run for run in _runs_in(path.parent)}
    close = difflib.get_close_matches(path.name, runs, 1, 0.6)
    if close:
        return f"; did you mean {runs[close[0]]}?"
    return f"; runs beside it: {_listed(list(runs.values()))}" if runs else ""


def _runs_in(folder: Path) -> list[Path]:
    """The runs directly in a folder, the latest first."""
    found = [path.parent for path in folder.glob(f"*/{CONFIG}") if _is_run(path.parent)]
    return sorted(found, key=lambda run: (run / CONFIG).stat().st_mtime, reverse=True)


def _listed(runs: list[Path]) -> str:
    return ", ".join(str(run) for run in runs[:5]) + (", ..." if len(runs) > 5 else "")
