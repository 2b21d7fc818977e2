"""What comes back from a checkpoint is what was saved, or the run says why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from leantune.checkpoint.store import CheckpointStore
from leantune.errors import CheckpointError
from leantune.strategies.placement import Placement
from leantune.train.run import TrainState
from leantune.train.saving import RunCheckpoints
from leantune.train.steps import StepPlan

PLAN = StepPlan(10, 4, 2, 3, 6, 0)


class Trained:
    """A layer whose weight says at which step it was saved."""

    def __init__(
        self, folder: Path, *, plan: StepPlan = PLAN, writes: bool = True, keeps_best: bool = True
    ) -> None:
        self.layer = nn.Linear(2, 2, bias=False)
        placement = Placement(torch.device("cpu"))
        placement.take(dict(self.layer.named_parameters()))
        self.store = CheckpointStore(folder, keep=2)
        self.lines: list[str] = []
        self.checkpoints = RunCheckpoints(
            self.store,
            placement,
            torch.optim.SGD(self.layer.parameters(), lr=0.1),
            plan,
            saves=True,
            writes=writes,
            keeps_best=keeps_best,
            say=self.lines.append,
        )

    @property
    def value(self) -> float:
        return self.layer.weight[0, 0].item()

    @torch.no_grad()
    def save(self, step: int, best_step: int) -> TrainState:
        self.layer.weight.fill_(step)
        state = TrainState(step=step, best_step=best_step, best_loss=0.5, last_eval_loss=0.75)
        self.checkpoints.save(state, best_step == step)
        return state


def marked(store: CheckpointStore) -> str | None:
    path = store.best_path()
    return path.name if path else None


def test_the_best_parameters_come_back_and_it_is_said(tmp_path: Path) -> None:
    """A best checkpoint was kept that nothing ever used."""
    run = Trained(tmp_path)
    for step in (1, 2, 3, 4):
        state = run.save(step, best_step=min(step, 2))
    assert run.checkpoints.restore_best(state) == 2
    assert run.value == 2.0
    assert run.lines[-1] == (
        "exporting the best weights: step 2, validation loss 0.5000; the last were 0.7500"
    )


@pytest.mark.parametrize("case", ["last is best", "not the writer", "not asked for", "no evaluation"])
def test_the_last_parameters_stay_where_there_are_no_better_ones(case: str, tmp_path: Path) -> None:
    """A run without validation, or a rank that does not see the folder, went back to an older state."""
    for step in (1, 2):
        Trained(tmp_path).save(step, best_step=1)
    run = Trained(tmp_path, writes=case != "not the writer", keeps_best=case != "not asked for")
    best = {"last is best": 2, "no evaluation": None}.get(case, 1)
    before = run.value
    assert run.checkpoints.restore_best(TrainState(step=2, best_step=best)) == 2
    assert run.value == before
    assert run.lines == []


def test_a_broken_best_checkpoint_ends_the_run_and_a_lost_one_is_told(tmp_path: Path) -> None:
    """Other weights than the ones asked for were exported without a word."""
    run = Trained(tmp_path)
    for step in (1, 2):
        state = run.save(step, best_step=1)
    path = run.store.path_of(1)
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=rf"best weights cannot be exported: .*; delete {path}"):
        run.checkpoints.restore_best(state)
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    assert run.checkpoints.restore_best(state) == 2
    assert "is gone; exporting the last weights: step 2" in run.lines[-1]


def test_a_best_checkpoint_that_was_saved_but_not_marked_is_marked_on_resume(tmp_path: Path) -> None:
    """After a kill between the two the mark stayed on an older one, and the best was pruned later."""
    run = Trained(tmp_path)
    run.save(1, best_step=1)
    run.save(2, best_step=2)
    run.store.mark_best(1)
    state = TrainState()
    again = Trained(tmp_path)
    restored = again.checkpoints.restore(state)
    assert restored is not None
    assert (restored.step, state.best_step, again.value) == (2, 2, 2.0)
    assert marked(run.store) == "step-00000002"
    again.store.mark_best(1)
    Trained(tmp_path, writes=False).checkpoints.restore(TrainState())
    assert marked(run.store) == "step-00000001", "a rank that does not write has written"


@pytest.mark.parametrize("key", ["num_records", "global_batch_size", "steps_per_epoch"])
def test_a_checkpoint_of_other_records_or_batches_is_refused(key: str, tmp_path: Path) -> None:
    """Some records would have been seen twice and others never."""
    Trained(tmp_path).save(1, best_step=1)
    other = Trained(tmp_path, plan=replace(PLAN, **{key: 99}))
    before = other.value
    with pytest.raises(CheckpointError, match=rf"{key} was \d+ and is 99"):
        other.checkpoints.restore(TrainState())
    assert other.value == before


def test_another_number_of_steps_is_no_other_run(tmp_path: Path) -> None:
    Trained(tmp_path).save(1, best_step=1)
    longer = Trained(tmp_path, plan=replace(PLAN, total_steps=60, micro_batch_size=1))
    assert longer.checkpoints.restore(TrainState()) is not None


def test_the_scale_of_fp16_losses_continues_where_it_was(tmp_path: Path) -> None:
    """A resumed run began again at 65536, and lost its first steps to overflows."""
    Trained(tmp_path).checkpoints.save(TrainState(step=3, loss_scale=128.0, steps_at_scale=17), best=False)
    state = TrainState()
    assert Trained(tmp_path).checkpoints.restore(state) is not None
    assert (state.step, state.loss_scale, state.steps_at_scale) == (3, 128.0, 17)
