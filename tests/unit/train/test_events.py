"""The events of a run: valid JSON lines whatever the numbers, and trackers that cannot stop a run."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from leantune.checkpoint.run_folder import RunFolder
from leantune.errors import CheckpointError, ConfigError
from leantune.train import events as events_module
from leantune.train.events import Events, MetricsWriter
from leantune.train.progress import Progress


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().split("\n")[:-1]]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(str(tmp_path / "run"), "run", False)
    run.write_config("model: {name: demo}\ndata: {train: dummy}\n")
    return run


def test_numbers_that_are_not_finite_are_null_and_named(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write({"step": 1, "loss": math.nan, "grad_norm": -math.inf, "epoch": 0.5})
    writer.write({"step": np.int64(2), "loss": np.float32(0.5), "text": "a\nb\u2028"})
    writer.close()
    assert read(tmp_path / "m.jsonl") == [
        {"step": 1, "loss": None, "grad_norm": None, "epoch": 0.5, "nonfinite": ["loss", "grad_norm"]},
        {"step": 2, "loss": 0.5, "text": "a\nb\u2028"},
    ]


KILLED = """
import os, sys
from pathlib import Path
from leantune.train.events import MetricsWriter

writer = MetricsWriter(Path(sys.argv[1]))
writer.write({"step": 1, "loss": 2.0})
os.kill(os.getpid(), 9)
"""


def test_a_row_is_in_the_file_when_its_write_returns(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "m.jsonl")], check=False)
    assert read(tmp_path / "m.jsonl") == [{"step": 1, "loss": 2.0}]


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ('{"step": 1}\n{"step": 2, "lo', [1]),
        ('{"step": 1}\n{"step": 2}', [1, 2]),
        ('{"step": 1}\n', [1]),
        ('{"st', []),
        ("", []),
        ('{"step": 1}\n\x00\x00', [1]),
    ],
)
def test_a_half_written_last_line_does_not_spoil_the_next_row(
    tmp_path: Path, before: str, kept: list[int]
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(before)
    writer = MetricsWriter(path)
    writer.write({"step": 9})
    writer.close()
    assert [row["step"] for row in read(path)] == [*kept, 9]


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "m.jsonl").symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path / "m.jsonl")
    with pytest.raises(CheckpointError, match=rf"m\.jsonl: {os.strerror(errno.ENOSPC)}; free some space"):
        writer.write({"step": 1})


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write .*m\.jsonl: Is a directory"):
        MetricsWriter(tmp_path / "m.jsonl")


class Recorder:
    """A tracker that keeps what it gets and fails from some step on."""

    def __init__(self, name: str, fails_at: int | None = None, fails_to_close: bool = False) -> None:
        self.name = name
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self._fails_at = fails_at
        self._fails_to_close = fails_to_close

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._fails_at is not None and step >= self._fails_at:
            raise ConnectionError("the server is gone\nwith a long trace")
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True
        if self._fails_to_close:
            raise ConnectionError


def begin(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, trackers: list[Recorder], **options: Any
) -> tuple[Events, io.StringIO]:
    screen = io.StringIO()
    progress = Progress(console=Console(file=screen, width=80))
    monkeypatch.setattr(events_module, "open_trackers", lambda *_a, **_k: trackers)
    monkeypatch.setattr(events_module, "check_trackers", lambda _names: None)
    names = [tracker.name for tracker in trackers]
    events = Events(folder, trackers=names, progress=progress, **options)
    events.begin(10)
    return events, screen


def test_rows_reach_the_file_the_trackers_the_screen_and_the_caller(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    recorder = Recorder("recorder")
    events, screen = begin(folder, monkeypatch, [recorder], notify=seen.append)
    events.step({"step": 1, "loss": 2.0, "seconds": 1.0, "total_tokens": 10})
    events.evaluation({"step": 1, "eval_loss": 1.5, "eval_tokens": 7})
    events.message("hello")
    events.close()
    expected = [
        {"step": 1, "loss": 2.0, "seconds": 1.0, "total_tokens": 10},
        {"step": 1, "eval_loss": 1.5, "eval_tokens": 7},
    ]
    assert read(folder.metrics) == expected
    assert seen == expected
    assert recorder.rows[1] == (1, {"eval_loss": 1.5, "eval_tokens": 7.0})
    assert recorder.closed
    lines = screen.getvalue().splitlines()
    assert lines[0].startswith("step 1/10  loss 2.0000")
    assert lines[1:] == ["step 1/10  validation loss 1.5000, 7 tokens", "hello"]


def test_a_tracker_that_fails_is_off_with_one_line_and_the_run_goes_on(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad, late = Recorder("good"), Recorder("bad", fails_at=2), Recorder("late", fails_to_close=True)
    events, screen = begin(folder, monkeypatch, [bad, good, late])
    for step in (1, 2, 3):
        events.step({"step": step, "loss": 1.0})
    events.close()
    assert [step for step, _ in good.rows] == [1, 2, 3]
    assert [step for step, _ in bad.rows] == [1]
    assert good.closed
    output = screen.getvalue()
    assert output.count("bad failed and is off for the rest of the run: the server is gone\n") == 1
    assert "late failed and is off for the rest of the run: ConnectionError" in output
    assert len(read(folder.metrics)) == 3


def test_a_resumed_run_appends_behind_what_is_kept(folder: RunFolder) -> None:
    folder.metrics.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    events = Events(folder, quiet=True)
    folder.truncate_metrics(1)  # replaces the file: the writer must not hold the old one open
    events.begin(4, done=1)
    events.step({"step": 2, "loss": 1.0})
    events.close()
    assert [row["step"] for row in read(folder.metrics)] == [1, 2]


def test_other_ranks_write_nothing(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[dict[str, Any]] = []
    events = Events(folder, main=False, trackers=["wandb"], notify=seen.append)
    events.begin(2)
    events.message("hello")
    events.step({"step": 1, "loss": 1.0})
    events.close()
    assert not folder.metrics.exists()
    assert seen == []
    assert capsys.readouterr().out == ""


def test_a_missing_tracker_is_refused_before_anything_is_opened(folder: RunFolder) -> None:
    with pytest.raises(ConfigError, match="neptune"):
        Events(folder, trackers=["neptune"])
    assert not folder.metrics.exists()
