"""Everything that one rank holds during a run, put together once by `assemble` and used by the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from leantune.bases import BuiltBase
from leantune.data.batches import MicroBatch, Window, collate, cut_window, epoch_windows
from leantune.data.records import EncodedRecords, IntArray
from leantune.methods import Attached
from leantune.models.precision import Precision
from leantune.strategies.placement import Placement
from leantune.strategies.process import World
from leantune.strategies.stop import StopRequest
from leantune.train.events import Events
from leantune.train.objectives import Objective
from leantune.train.optimizer import Schedule
from leantune.train.prefix import PrefixCache
from leantune.train.steps import StepPlan


@dataclass
class TrainState:
    """What has happened so far; saved with each checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    last_eval_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    stale_evaluations: int = 0
    loss_scale: float = 2.0**16  # of fp16_mixed
    steps_at_scale: int = 0


@dataclass(frozen=True)
class LoopSettings:
    """The numbers of the configuration that the loop itself obeys."""

    seed: int
    group_by_length: bool
    max_grad_norm: float | None
    precision: Precision
    eval_every_steps: int | None
    eval_micro_batch_size: int
    keep_best: bool
    patience: int | None
    min_delta: float
    checkpoint_every_steps: int | None
    reshuffle: Literal["records", "windows"] = "records"


@dataclass
class Run:
    """The parts of a run on one rank. The model is `attached.model`."""

    world: World
    model: PreTrainedModel
    base: BuiltBase
    attached: Attached
    objective: Objective
    placement: Placement
    description: list[str]
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    train_records: EncodedRecords
    validation_records: EncodedRecords | None
    pad_id: int
    plan: StepPlan
    settings: LoopSettings
    events: Events
    stop: StopRequest
    save_checkpoint: Callable[[TrainState, bool], None]
    peak_memory_gib: Callable[[], float]
    prefix: PrefixCache = field(default_factory=PrefixCache)
    _epoch: tuple[int, list[IntArray]] | None = field(default=None, init=False)

    def window(self, step: int) -> Window:
        """The records of a step (counted from 0), cut into micro-batches."""
        epoch, index = self.plan.place(step)
        if self._epoch is None or self._epoch[0] != epoch:
            windows = epoch_windows(
                self.train_records.lengths,
                self.plan.global_batch_size,
                self.settings.seed,
                epoch,
                self.settings.group_by_length,
                self.settings.reshuffle,
            )
            self._epoch = (epoch, windows)
        return cut_window(self.train_records, self._epoch[1][index], self.plan.micro_batch_size)

    def micro_batch(self, window: Window, index: int, step: int) -> MicroBatch:
        """One micro-batch of a window, on the device, with a seed that no other micro-batch has."""
        seed = int(np.random.SeedSequence([self.settings.seed, step, index]).generate_state(1)[0])
        return collate(self.train_records, window.chunks[index], self.pad_id, seed).to(self.world.device)

    def idle_batch(self, window: Window) -> MicroBatch:
        """The shortest record of a window, for a rank that only keeps in step with the others."""
        return collate(self.train_records, window.chunks[-1][-1:], self.pad_id).to(self.world.device)
