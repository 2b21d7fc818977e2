"""The resumable state of a run: what goes into its checkpoints, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch

from leantune.checkpoint.optimizer_state import load_optimizer, optimizer_tensors
from leantune.checkpoint.store import Checkpoint, CheckpointStore
from leantune.errors import CheckpointError
from leantune.methods import Attached
from leantune.train.run import TrainState
from leantune.train.steps import StepPlan

_PARAMETERS = "parameters/"
# What decides which records a step is made of; a resumed run must not differ in it.
_PLAN_KEYS = ("num_records", "global_batch_size", "steps_per_epoch")


class RunCheckpoints:
    """Saves and restores the trained parameters, the optimizer and the position of a run.

    `writes`: this rank writes the checkpoints (one does); `keeps_best`: the best one is marked.
    All ranks restore, from what they see of the folder.
    """

    def __init__(
        self,
        store: CheckpointStore,
        attached: Attached,
        optimizer: torch.optim.Optimizer,
        plan: StepPlan,
        *,
        writes: bool,
        keeps_best: bool,
        say: Callable[[str], None],
    ) -> None:
        self._store = store
        self._attached = attached
        self._optimizer = optimizer
        self._names = {parameter: name for name, parameter in attached.trainable().items()}
        self._plan = {key: getattr(plan, key) for key in _PLAN_KEYS}
        self._writes = writes
        self._keeps_best = keeps_best
        self._say = say

    def save(self, state: TrainState, best: bool) -> None:
        """Write a checkpoint of this moment."""
        if not self._writes:
            return
        tensors = {f"{_PARAMETERS}{name}": p.detach() for name, p in self._attached.trainable().items()}
        states, scalars = optimizer_tensors(self._optimizer, self._names)
        values = {"train": asdict(state), "optimizer": scalars, "plan": self._plan}
        path = self._store.save(state.step, {**tensors, **states}, values, best=best)
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
        load_optimizer(self._optimizer, self._names, checkpoint.tensors, checkpoint.state["optimizer"])
        state.__dict__.update(checkpoint.state["train"])
        # A kill between a checkpoint and its mark, or the loss of a newer one, leaves another one marked.
        best = state.best_step
        if self._writes and self._keeps_best and best is not None and best in self._store.steps():
            self._store.mark_best(best)
        return checkpoint

    def restore_best(self, state: TrainState) -> int:
        """On the rank that writes, give the parameters their values of the lowest validation loss.

        Returns the step that the parameters are from. Raises `CheckpointError` if that checkpoint is broken.
        """
        best = state.best_step
        if not (self._writes and self._keeps_best) or best is None or best == state.step:
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
        trainable = self._attached.trainable()
        differing = sorted(saved.keys() ^ trainable.keys())
        if differing:
            raise CheckpointError(
                f"{checkpoint.path} does not fit this run's method or model; differing names: "
                f"{', '.join(differing[:5])} ({len(differing)} in all)"
            )
        for name, parameter in trainable.items():
            if saved[name].shape != parameter.shape:
                raise CheckpointError(
                    f"{checkpoint.path}: {name} is {tuple(saved[name].shape)}, "
                    f"expected {tuple(parameter.shape)}"
                )
            parameter.copy_(saved[name])
