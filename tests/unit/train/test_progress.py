"""What a person sees: a live bar on a terminal, few plain lines in a log file."""

from __future__ import annotations

import io
import os
import pty
from typing import Any

import pytest
from rich.console import Console

from leantune.train.progress import Progress, describe_step


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 1.5,
        "learning_rate": 2e-4,
        "total_tokens": 100,
        "seconds": 2.0 * step,
        **more,
    }


class Screen:
    """A console that writes into memory, and a clock that is set by hand."""

    def __init__(self, **options: Any) -> None:
        self.file = io.StringIO()
        self.now = 0.0
        console = Console(file=self.file, width=80, **options)
        self.progress = Progress(console=console, clock=lambda: self.now)

    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


def test_a_log_file_gets_the_first_the_last_and_one_line_in_ten_seconds() -> None:
    screen = Screen()
    screen.progress.start(100)
    for step in range(1, 101):
        screen.now = step * 0.5
        screen.progress.step(row(step))
    screen.progress.close()
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in screen.lines()]
    assert steps == [1, 21, 41, 61, 81, 100]
    assert screen.lines()[0] == "step 1/100  loss 1.5000  lr 2.00e-04  50 tokens/s  3:18 left"
    assert screen.lines()[-1] == "step 100/100  loss 1.5000  lr 2.00e-04  50 tokens/s"


def test_slow_steps_are_all_printed() -> None:
    screen = Screen()
    screen.progress.start(5)
    for step in range(1, 6):
        screen.now = step * 60.0
        screen.progress.step(row(step))
    assert len(screen.lines()) == 5


def test_the_last_step_of_a_run_that_stops_early_is_printed_once() -> None:
    screen = Screen()
    screen.progress.start(100)
    for step in (1, 2, 3):
        screen.progress.step(row(step))
    screen.progress.close()
    screen.progress.close()
    assert [line.split("  ")[0] for line in screen.lines()] == ["step 1/100", "step 3/100"]


def test_time_left_of_a_resumed_run_comes_from_its_own_steps() -> None:
    """`seconds` goes on from before the stop; the first new step must not count all of it."""
    screen = Screen()
    screen.progress.start(100, done=50)
    screen.progress.step(row(51, seconds=5000.0, tokens_per_second=40.0))
    screen.now = 11
    screen.progress.step(row(52, seconds=5004.0))
    assert screen.lines()[0].endswith("40 tokens/s")
    assert screen.lines()[1].endswith("25 tokens/s  3:12 left")


def test_long_messages_and_markup_are_printed_as_they_are() -> None:
    screen = Screen()
    text = "[red]layers[0][/] " + "word " * 60
    screen.progress.print(text)
    assert screen.file.getvalue() == text + "\n"


def test_an_evaluation_has_its_own_line() -> None:
    screen = Screen()
    screen.progress.start(20)
    screen.progress.evaluation(
        {"step": 10, "eval_loss": 0.5, "eval_perplexity": 1.6487, "eval_tokens": 12345}
    )
    assert screen.lines() == ["step 10/20  validation loss 0.5000, perplexity 1.6487, 12,345 tokens"]


@pytest.mark.parametrize("options", [{"rank": 1}, {"quiet": True}])
def test_other_ranks_and_quiet_runs_print_nothing(options: dict[str, Any]) -> None:
    file = io.StringIO()
    progress = Progress(console=Console(file=file), live=True, **options)
    progress.start(2)
    progress.step(row(1))
    progress.evaluation({"step": 1, "eval_loss": 1.0})
    progress.print("hello")
    progress.close()
    assert file.getvalue() == ""


def test_messages_do_not_break_a_live_bar() -> None:
    file = io.StringIO()
    progress = Progress(console=Console(file=file, force_terminal=True, width=100), live=True)
    progress.start(3)
    progress.step(row(1))
    progress.print("checkpoint saved")
    progress.step(row(3, loss=0.25))
    progress.close()
    output = file.getvalue()
    assert "checkpoint saved\n" in output
    assert "step 3/3" in output
    assert "loss 0.2500" in output
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1, "the cursor must be shown again"


def test_forced_colour_does_not_put_a_bar_into_a_pipe() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    assert console.is_terminal
    assert Progress(console=console)._live is False


def test_a_terminal_gets_the_bar_unless_it_is_dumb() -> None:
    primary, secondary = pty.openpty()
    try:
        with os.fdopen(secondary, "w") as terminal:
            assert Progress(console=Console(file=terminal, _environ={"TERM": "xterm"}))._live is True
            assert Progress(console=Console(file=terminal, _environ={"TERM": "dumb"}))._live is False
    finally:
        os.close(primary)


def test_odd_numbers_are_shown() -> None:
    assert describe_step({"step": 1, "loss": float("nan")}) == "loss nan"
    assert describe_step({"step": 1, "loss": 123456.0}, float("inf")) == "loss 1.23e+05  unknown time left"
    assert describe_step({"step": 1, "peak_memory_gib": 1.234}, 7384) == "1.23 GiB  2:03:04 left"
    assert describe_step({"step": 1}) == ""
