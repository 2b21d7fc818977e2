"""The resumable state of a run: what goes into its checkpoints, and how it comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from leantune.checkpoint.optimizer_state import PREFIX, load_optimizer, optimizer_tensors
from leantune.checkpoint.store import Checkpoint, CheckpointStore
from leantune.errors import CheckpointError
from leantune.strategies.placement import Placement
from leantune.train.run import TrainState
from leantune.train.steps import StepPlan

_PARAMETERS = "parameters/"
# What decides which records a step is made of; a resumed run must not differ in it.
_PLAN_KEYS = ("num_records", "global_batch_size", "steps_per_epoch")


class RunCheckpoints:
    """Saves and restores the trained parameters, the optimizer and the position of a run.

    `saves`: checkpoints are written at all; `writes`: by this rank (one does); `keeps_best`: the best
    one is marked. All ranks call `save`, to gather what is sharded, and restore from what they see of the
    folder; a checkpoint holds whole tensors, whatever the number of ranks.
    """

    def __init__(
        self,
        store: CheckpointStore,
        placement: Placement,
        optimizer: torch.optim.Optimizer,
        plan: StepPlan,
        *,
        saves: bool,
        writes: bool,
        keeps_best: bool,
        say: Callable[[str], None],
    ) -> None:
        self._store = store
        self._placement = placement
        self._optimizer = optimizer
        self._names = {parameter: name for name, parameter in placement.trained.items()}
        self._plan = {key: getattr(plan, key) for key in _PLAN_KEYS}
        self._saves = saves
        self._writes = writes
        self._keeps_best = keeps_best
        self._say = say

    def save(self, state: TrainState, best: bool) -> None:
        """Write a checkpoint of this moment."""
        if not self._saves:
            return
        tensors = {f"{_PARAMETERS}{name}": p.detach() for name, p in self._placement.trained.items()}
        states, scalars = optimizer_tensors(self._optimizer, self._names)
        whole = self._gathered({**tensors, **states})
        self._set_shapes(scalars, {n: p.shape for n, p in self._placement.whole_parameters.items()})
        if not self._writes:
            return
        values = {"train": asdict(state), "optimizer": scalars, "plan": self._plan}
        path = self._store.save(state.step, whole, values, best=best)
        self._say(f"checkpoint saved: {path}")

    def restore(self, state: TrainState) -> Checkpoint | None:
        """Go back to the newest complete checkpoint, if there is one; returns it.

        Raises `CheckpointError` if it is not of this model, method and records.
        """
        checkpoint, lines = self._store.newest()
        for line in lines:
            self._say(line)
        if checkpoint is None:
            return None
        self._check_plan(checkpoint)
        self._load_parameters(checkpoint)
        cut = {name: self._cut(name, tensor) for name, tensor in checkpoint.tensors.items()}
        scalars = copy.deepcopy(checkpoint.state["optimizer"])
        self._set_shapes(scalars, {n: p.shape for n, p in self._placement.trained.items()})
        load_optimizer(self._optimizer, self._names, cut, scalars)
        state.__dict__.update(checkpoint.state["train"])
        # A kill between a checkpoint and its mark, or the loss of a newer one, leaves another one marked.
        best = state.best_step
        if self._writes and self._keeps_best and best is not None and best in self._store.steps():
            self._store.mark_best(best)
        return checkpoint

    def restore_best(self, state: TrainState) -> int:
        """Give the parameters their values of the lowest validation loss.

        Only the ranks that need them do: all if parameters are sharded, else the one that writes. Returns
        the step that the parameters are from. Raises `CheckpointError` if that checkpoint is broken.
        """
        best = state.best_step
        concerned = self._saves and (self._writes or self._placement.equal_passes)
        if not (concerned and self._keeps_best) or best is None or best == state.step:
            return state.step
        path = self._store.path_of(best)
        if not path.exists():
            self._say(f"the best checkpoint, {path}, is gone; exporting the last weights: step {state.step}")
            return state.step
        try:
            self._load_parameters(self._store.load(path))
        except CheckpointError as error:
            raise CheckpointError(
                f"the best weights cannot be exported: {error}; delete {path} and resume to export the last"
            ) from error
        self._say(
            f"exporting the best weights: step {best}, validation loss {state.best_loss:.4f}; "
            f"the last were {state.last_eval_loss:.4f}"
        )
        return best

    def _check_plan(self, checkpoint: Checkpoint) -> None:
        saved = checkpoint.state["plan"]
        differing = [
            f"{key} was {saved[key]} and is {now}" for key, now in self._plan.items() if saved[key] != now
        ]
        if differing:
            raise CheckpointError(
                f"{checkpoint.path} is of a run on other records or batches: {', '.join(differing)}; put "
                "run.yaml and records/ back as they were, or train again with output.overwrite=true"
            )

    @torch.no_grad()
    def _load_parameters(self, checkpoint: Checkpoint) -> None:
        saved = {
            name.removeprefix(_PARAMETERS): tensor
            for name, tensor in checkpoint.tensors.items()
            if name.startswith(_PARAMETERS)
        }
        trained = self._placement.trained
        differing = sorted(saved.keys() ^ trained.keys())
        if differing:
            raise CheckpointError(
                f"{checkpoint.path} does not fit this run's method or model; differing names: "
                f"{', '.join(differing[:5])} ({len(differing)} in all)"
            )
        for name, parameter in trained.items():
            expected = self._placement.whole_parameters[name].shape
            if saved[name].shape != expected:
                raise CheckpointError(
                    f"{checkpoint.path}: {name} is {tuple(saved[name].shape)}, expected {tuple(expected)}"
                )
            parameter.copy_(self._placement.part(name, saved[name]))

    def _gathered(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, in host memory where they had to be gathered; empty on ranks that do not write."""
        gathered: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            whole = self._placement.whole(_parameter_of(name), tensor)
            if self._writes:
                gathered[name] = whole if whole is tensor else whole.cpu()
        return gathered

    @staticmethod
    def _set_shapes(scalars: dict[str, Any], shapes: Mapping[str, torch.Size]) -> None:
        """A checkpoint has the shapes of whole parameters, the optimizer those of this rank's rows."""
        for name, entry in scalars["parameters"].items():
            if name in shapes:
                entry["shape"] = list(shapes[name])

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        return self._placement.part(_parameter_of(name), whole)


def _parameter_of(name: str) -> str:
    """The parameter that a tensor of a checkpoint belongs to."""
    if name.startswith(_PARAMETERS):
        return name.removeprefix(_PARAMETERS)
    return name.removeprefix(PREFIX).rpartition("/")[0]
