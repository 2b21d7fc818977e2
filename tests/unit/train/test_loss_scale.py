"""The scale of fp16 losses: a step that overflows changes nothing but the scale."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leantune.checkpoint.run_folder import RunFolder
from leantune.config import RunConfig, validate
from leantune.errors import NumericsError
from leantune.models.source import load_tokenizer, resolve_model
from leantune.strategies.stop import StopRequest
from leantune.train.assemble import assemble
from leantune.train.events import Events
from leantune.train.loop import adapt_loss_scale, train_step
from leantune.train.prepare import prepare_run
from leantune.train.run import Run, TrainState
from leantune.train.saving import RunCheckpoints
from tests.fixtures import tiny_model_folder
from tests.grid import ALONE

TOO_LARGE = 2.0**60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def prepared(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> tuple[RunConfig, RunFolder]:
    """A run in fp16_mixed with a method (default: lora) that is about to start."""
    rows = [{"prompt": f"number {'one ' * i}", "completion": f"there are {i}"} for i in range(6)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = validate(
        {
            "model": str(model),
            "data": {"train": str(tmp_path / "r.jsonl"), "cache": False},
            "method": getattr(request, "param", "lora"),
            "train": {"precision": "fp16_mixed", "device": "cpu", "learning_rate": 1e-2, "epochs": 9},
            "output": {"dir": str(tmp_path / "run")},
        }
    )
    folder = prepare_run(config, "run", lambda _line: None)
    folder.lock.release()
    return config, folder


def assembled(config: RunConfig, folder: RunFolder, rows: list[Any]) -> tuple[Run, RunCheckpoints]:
    """The run, as its rank puts it together; `rows` takes what is recorded of its steps."""
    events = Events(folder, quiet=True, notify=lambda row: rows.append(dict(row)))
    events.begin(10)
    tokenizer = load_tokenizer(resolve_model(config.model.name))
    run, checkpoints = assemble(config, folder, ALONE, tokenizer, events, StopRequest())
    run.model.train()
    return run, checkpoints


def everything(run: Run) -> dict[str, Tensor]:
    """Copies of the trained parameters and of what the optimizer knows of them."""
    kept = {name: p.detach().clone() for name, p in run.placement.trained.items()}
    for name, parameter in run.placement.trained.items():
        for key, value in run.optimizer.state[parameter].items():
            kept[f"{name}/{key}"] = torch.as_tensor(value).clone()
    return kept


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("prepared", ["lora", "loreft", "full"], indirect=True)
def test_a_step_that_overflows_is_skipped_and_the_next_one_trains(
    prepared: tuple[RunConfig, RunFolder],
) -> None:
    """Infinite gradients, divided and clipped, made NaN of every trained weight and moment."""
    rows: list[Any] = []
    run, _ = assembled(*prepared, rows)
    state = TrainState(loss_scale=256.0)
    train_step(run, state)
    before = everything(run)
    state.loss_scale, state.steps_at_scale = TOO_LARGE, 5
    train_step(run, state)
    assert same(everything(run), before)
    assert (state.step, state.loss_scale, state.steps_at_scale) == (2, TOO_LARGE / 2, 0)
    assert all(parameter.grad is None for parameter in run.placement.trained.values())
    state.loss_scale = 256.0
    train_step(run, state)
    after = everything(run)
    assert not same(after, before)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
    assert state.steps_at_scale == 1
    assert [row["loss_scale"] for row in rows] == [256.0, TOO_LARGE, 256.0]
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert [math.isfinite(row["grad_norm"]) for row in rows] == [True, False, True]


def test_gradients_do_not_depend_on_the_scale(prepared: tuple[RunConfig, RunFolder]) -> None:
    """A scale that is not taken out again is a learning rate of thousands; powers of two lose no bit."""
    rows: list[Any] = []
    run, _ = assembled(*prepared, rows)
    start = everything(run)
    ends: list[dict[str, Tensor]] = []
    for scale in (2.0**8, 2.0**12):
        with torch.no_grad():
            for name, parameter in run.placement.trained.items():
                parameter.copy_(start[name])
        run.optimizer.state.clear()
        train_step(run, TrainState(loss_scale=scale))
        ends.append(everything(run))
    assert rows[0]["grad_norm"] == pytest.approx(rows[1]["grad_norm"], rel=1e-3)
    assert rows[0]["loss"] == rows[1]["loss"]
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-2, atol=1e-3)


def test_the_search_for_a_scale_ends(prepared: tuple[RunConfig, RunFolder]) -> None:
    """Case 9: a model that overflows at every scale skipped all of its steps and said it had trained."""
    run, _ = assembled(*prepared, [])
    with torch.no_grad():
        for parameter in run.placement.trained.values():
            # The loss stays what it is, but its gradients pass through these on their way down.
            parameter.register_hook(lambda gradient: gradient * math.inf)
    state = TrainState(loss_scale=2.0**-13)
    before = everything(run)
    train_step(run, state)
    with pytest.raises(NumericsError, match=r"step 2: gradients overflow fp16 at every loss scale") as caught:
        train_step(run, state)
    assert "train.precision bf16_mixed or fp32" in str(caught.value)
    assert same(everything(run), before)


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale(prepared: tuple[RunConfig, RunFolder]) -> None:
    """It was taken for an overflow: thirty steps without effect, and then no word of the records."""
    run, _ = assembled(*prepared, [])
    with torch.no_grad():
        next(iter(run.placement.trained.values())).fill_(math.nan)
    state = TrainState()
    with pytest.raises(NumericsError, match=r"step 1: the loss is nan; records of the micro-batches"):
        train_step(run, state)
    assert state.loss_scale == TrainState().loss_scale


def test_a_resumed_run_goes_on_with_its_scale(prepared: tuple[RunConfig, RunFolder]) -> None:
    """Beginning at 65536 again, it would skip steps that the run without a stop did not skip."""
    run, checkpoints = assembled(*prepared, [])
    state = TrainState()
    train_step(run, state)
    state.loss_scale = TOO_LARGE
    train_step(run, state)
    checkpoints.save(state, False)
    train_step(run, state)
    again, restored = assembled(*prepared, [])
    found = TrainState()
    assert restored.restore(found) is not None
    assert (found.step, found.loss_scale, found.steps_at_scale) == (2, TOO_LARGE / 2, 0)
    train_step(again, found)
    assert found.loss_scale == state.loss_scale == TOO_LARGE / 4
    assert same(everything(again), everything(run))


def test_the_scale_doubles_after_2000_steps_without_overflow() -> None:
    """One that only ever falls ends where small gradients vanish."""
    state = TrainState(loss_scale=8.0)
    for _ in range(1999):
        adapt_loss_scale(state, overflow=False)
    assert (state.loss_scale, state.steps_at_scale) == (8.0, 1999)
    adapt_loss_scale(state, overflow=False)
    assert (state.loss_scale, state.steps_at_scale) == (16.0, 0)
    for _ in range(1999):
        adapt_loss_scale(state, overflow=False)
    adapt_loss_scale(state, overflow=True)
    assert (state.loss_scale, state.steps_at_scale) == (8.0, 0)


def test_the_smallest_scale_is_still_tried() -> None:
    state = TrainState(loss_scale=2.0**-12, step=7)
    adapt_loss_scale(state, overflow=True)
    adapt_loss_scale(state, overflow=True)
    assert state.loss_scale == 2.0**-14
    with pytest.raises(NumericsError, match="step 7"):
        adapt_loss_scale(state, overflow=True)
