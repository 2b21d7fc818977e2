"""Trackers: refused before training if missing, never the death of a run."""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from leantune.errors import ConfigError
from leantune.train.trackers import check_trackers, open_trackers


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Let these packages look as if they were not installed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in packages else real(name, *a)
    )


def test_missing_packages_are_named_all_at_once_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "wandb", "trackio")
    with pytest.raises(ConfigError) as refused:
        check_trackers(["wandb", "trackio", "neptune"])
    message = str(refused.value)
    assert '`uv pip install "leantune[wandb]"`' in message
    assert '`uv pip install "leantune[trackio]"`' in message
    assert "'neptune' is not one of tensorboard, trackio, wandb" in message
    assert len(refused.value.problems) == 3


def test_the_folder_that_wandb_leaves_behind_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "run-1").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="wandb is not installed"):
        check_trackers(["wandb"])


def test_checking_imports_nothing() -> None:
    import subprocess

    code = (
        "import sys; from leantune.train.trackers import check_trackers; check_trackers(['tensorboard']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'tensorboard')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tensorboard_has_the_curves_and_hides_the_abandoned_part(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options: dict[str, Any] = {"project": "p", "config": {}}
    (first,) = open_trackers(["tensorboard"], tmp_path, **options)
    for step in (1, 2, 3):
        first.log(step, {"loss": float(step), "eval_loss": 9.0})
    first.close()
    (second,) = open_trackers(["tensorboard"], tmp_path, first_step=3, **options)
    second.log(3, {"loss": 30.0})
    second.log(4, {"loss": math.nan})
    second.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    curve = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert curve[:3] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert curve[3][0] == 4
    assert math.isnan(curve[3][1])
    assert [event.step for event in events.Scalars("eval/loss")] == [1, 2]


class RecordingRun:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished = True


def installed_service(monkeypatch: pytest.MonkeyPatch, name: str, init: Any) -> None:
    """A package of that name which can be found and imported."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, loader=None, origin="here")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_joins_the_group_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls: list[dict[str, Any]] = []
    run = RecordingRun()
    installed_service(monkeypatch, name, lambda **options: calls.append(options) or run)
    folder = tmp_path / "sql"
    for first_step in (1, 41):
        (tracker,) = open_trackers([name], folder, project="p", config={"a": 1}, first_step=first_step)
    tracker.log(41, {"loss": 2.0, "grad_norm": math.inf})
    tracker.close()
    assert [(call["project"], call["name"], call["group"]) for call in calls] == [
        ("p", "sql", "sql"),
        ("p", "sql-from-41", "sql"),
    ]
    assert calls[0]["config"] == {"a": 1}
    assert run.rows == [(41, {"train/loss": 2.0})]
    assert run.finished


def test_a_tracker_that_cannot_start_is_an_error_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordingRun()

    def init(**_options: Any) -> None:
        raise RuntimeError("no API key")

    installed_service(monkeypatch, "trackio", lambda **_options: run)
    installed_service(monkeypatch, "wandb", init)
    with pytest.raises(ConfigError, match=r"wandb cannot start: no API key; .*WANDB_MODE=offline"):
        open_trackers(["trackio", "wandb"], tmp_path, project="p", config={})
    assert run.finished, "the tracker that had started must be closed"
