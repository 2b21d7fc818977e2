"""What a person sees while a run trains: a live bar on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from leantune.train.meters import Throughput

# What an evaluation may tell besides the loss, and over how many of what it is the mean.
_MEASURES = ("perplexity", "accuracy", "margin")
_UNITS = ("tokens", "records", "pairs")


class Progress:
    """Progress of a run, from `start` to `close`; messages may be printed before, between and after.

    Silent on ranks other than 0 and with `quiet`. Without a terminal one line is printed for the
    first and the last step, and between them at most every `seconds_between_lines` seconds.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        quiet: bool = False,
        console: Console | None = None,
        live: bool | None = None,
        seconds_between_lines: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = 0
        self._silent = quiet or rank != 0
        self._console = console or Console(highlight=False)
        self._live = _can_be_live(self._console) if live is None else live
        self._pace = seconds_between_lines
        self._clock = clock
        self._speed = Throughput()
        self._seconds: float | None = None
        self._last_line: float | None = None
        self._unprinted: str | None = None
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def start(self, total: int, done: int = 0) -> None:
        """Begin a run of `total` steps, of which a resumed run has already `done`."""
        self.total = total
        self._seconds = None if done else 0.0
        if self._silent or not self._live:
            return
        self._bar = Bar(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", markup=False),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=total, completed=done)
        self._bar.start()

    def step(self, row: Mapping[str, Any]) -> None:
        """Show a finished step; `row` has the keys of a metrics row, of which `step` is required."""
        if self._silent:
            return
        step = int(row["step"])
        text = describe_step({**row, **self._smoothed_speed(row)}, self._seconds_left(step))
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, description=text)
            return
        self._unprinted = f"step {step}/{self.total}  {text}"
        now = self._clock()
        if self._last_line is None or step >= self.total or now - self._last_line >= self._pace:
            self._last_line = now
            self._flush_step()

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Show an evaluation on a line of its own; `row` has `step` and `eval_*` keys."""
        parts = [f"validation loss {_number(row.get('eval_loss'))}"]
        parts += [f"{name} {_number(row[f'eval_{name}'])}" for name in _MEASURES if f"eval_{name}" in row]
        parts += [f"{row[f'eval_{unit}']:,} {unit}" for unit in _UNITS if f"eval_{unit}" in row]
        self.print(f"step {row['step']}/{self.total}  {', '.join(parts)}")

    def print(self, text: str) -> None:
        """Print a message without disturbing the bar."""
        if not self._silent:
            # soft_wrap: lines of a log file must not be folded at 80 columns.
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar down, or print the last step if it has not been printed."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._flush_step()

    def _flush_step(self) -> None:
        if self._unprinted is not None:
            self.print(self._unprinted)
            self._unprinted = None

    def _smoothed_speed(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Tokens per second over the recent steps; `seconds` of a row counts from the start of the run."""
        if "seconds" not in row or "total_tokens" not in row:
            return {}
        before, self._seconds = self._seconds, row["seconds"]
        if before is not None:
            self._speed.step(row["total_tokens"], row["seconds"] - before)
        speed = self._speed.tokens_per_second
        return {"tokens_per_second": speed} if speed else {}

    def _seconds_left(self, step: int) -> float | None:
        return self._speed.seconds_left(self.total - step) if step < self.total else None


def describe_step(row: Mapping[str, Any], seconds_left: float | None = None) -> str:
    """Loss, learning rate, speed, memory and time left of a step, those that `row` has, in one line."""
    parts = [f"loss {_number(row['loss'])}"] if "loss" in row else []
    if row.get("learning_rate") is not None:
        parts.append(f"lr {row['learning_rate']:.2e}")
    if row.get("tokens_per_second"):
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    if row.get("peak_memory_gib"):
        parts.append(f"{row['peak_memory_gib']:.2f} GiB")
    if seconds_left is not None:
        parts.append(f"{_duration(seconds_left)} left")
    return "  ".join(parts)


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:.4f}" if not math.isfinite(value) or abs(value) < 1e4 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any: 1:23, 2:03:04."""
    if not math.isfinite(seconds):
        return "unknown time"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _can_be_live(console: Console) -> bool:
    """A terminal that can redraw a line, or a notebook with widgets; never a pipe with forced colour."""
    if console.is_jupyter:
        return importlib.util.find_spec("ipywidgets") is not None
    isatty = getattr(console.file, "isatty", None)
    return console.is_interactive and not console.is_dumb_terminal and bool(isatty and isatty())
