"""Where the events of a run go: rows to metrics.jsonl, numbers to the trackers, all of it to the screen.

Rows are one JSON object a line. A step has: step, epoch, loss, learning_rate, grad_norm,
supervised_tokens, total_tokens, tokens_per_second, padding_share, peak_memory_gib, seconds.
An evaluation has: step, epoch, eval_loss, eval_perplexity, eval_tokens. Objectives other than
next_token count records or pairs instead of tokens, and measure accuracy (and margin) instead of perplexity.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leantune.checkpoint.run_folder import RunFolder, complete_lines
from leantune.config.yaml import read_yaml
from leantune.errors import CheckpointError
from leantune.train.meters import memory_baseline, peak_memory_gib
from leantune.train.progress import Progress
from leantune.train.trackers import Tracker, check_trackers, open_trackers

__all__ = ["Events", "MetricsWriter", "encode_row", "memory_baseline", "peak_memory_gib"]

Notify = Callable[[dict[str, Any]], None]


class MetricsWriter:
    """Appends rows to a JSONL file; every row is on its way to the disk when `write` returns.

    A last line that a killed process left half-written is removed first. Raises
    `CheckpointError` naming the file if the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            self._heal()
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror or error}") from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. NaN and infinity become null, and the row's `nonfinite` lists their keys."""
        try:
            self._file.write(encode_row(row))
            self._file.flush()
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path}: {error.strerror or error}; free some space, then resume the run"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _heal(self) -> None:
        if self._file.tell() == 0:
            return
        data = self.path.read_bytes()
        whole = complete_lines(data)
        if whole != data:
            # Either a part of a row is cut off, or a row that lacks its newline gets it.
            self._file.truncate(min(len(whole), len(data)))
            self._file.write(whole[len(data) :])
            self._file.flush()


def encode_row(row: Mapping[str, Any]) -> bytes:
    """One line of valid JSON; numbers of NumPy and one-element tensors become plain ones."""
    plain = {key: _plain(value) for key, value in row.items()}
    nonfinite = [key for key, value in plain.items() if isinstance(value, float) and not math.isfinite(value)]
    if nonfinite:
        plain |= {**dict.fromkeys(nonfinite), "nonfinite": nonfinite}
    return (json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n").encode()


class Events:
    """Fans the events of a run out to its metrics.jsonl, the trackers, the screen and `notify`.

    Only the main rank (`main`) does anything. Before `begin` only messages may come. A
    tracker that raises is dropped with one printed line; it never stops the run.
    Raises `ConfigError` if the package of a tracker is missing.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        main: bool = True,
        quiet: bool = False,
        trackers: Sequence[str] = (),
        project: str = "leantune",
        notify: Notify | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._folder = folder
        self._main = main
        self._tracker_names = tuple(trackers)
        self._project = project
        self._notify = notify
        self._progress = progress or Progress(rank=0 if main else 1, quiet=quiet)
        self._metrics: MetricsWriter | None = None
        self._trackers: list[Tracker] = []
        if main:
            check_trackers(self._tracker_names)

    def begin(self, total_steps: int, done: int = 0) -> None:
        """Open everything for a run of so many steps, of which a resumed one has already `done`."""
        if not self._main:
            return
        self._metrics = MetricsWriter(self._folder.metrics)
        if self._tracker_names:
            self._trackers = open_trackers(
                self._tracker_names,
                self._folder.path,
                project=self._project,
                config=read_yaml(self._folder.config)[0],
                first_step=done + 1,
            )
        self._progress.start(total_steps, done)

    def step(self, row: Mapping[str, Any]) -> None:
        """A finished step; the keys of a row are listed at the top of this file."""
        self._record(row)
        self._progress.step(row)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """A finished evaluation."""
        self._record(row)
        self._progress.evaluation(row)

    def message(self, text: str) -> None:
        """A line for the person who watches; not recorded."""
        self._progress.print(text)

    def close(self) -> None:
        """Close everything; what a tracker still raises is printed."""
        for tracker in list(self._trackers):
            try:
                tracker.close()
            except Exception as error:
                self._drop(tracker, error)
        self._trackers.clear()
        self._progress.close()
        if self._metrics is not None:
            self._metrics.close()

    def _record(self, row: Mapping[str, Any]) -> None:
        if self._metrics is None:
            return
        plain = {key: _plain(value) for key, value in row.items()}
        self._metrics.write(plain)
        numbers = {key: float(value) for key, value in plain.items() if _is_number(value) and key != "step"}
        for tracker in list(self._trackers):
            try:
                tracker.log(int(plain["step"]), numbers)
            except Exception as error:
                self._drop(tracker, error)
        if self._notify is not None:
            self._notify(plain)

    def _drop(self, tracker: Tracker, error: Exception) -> None:
        self._trackers.remove(tracker)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        self._progress.print(f"{tracker.name} failed and is off for the rest of the run: {reason}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """The plain number in a NumPy scalar or a one-element tensor; other values as they are."""
    return value.item() if hasattr(value, "item") else value
