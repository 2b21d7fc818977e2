"""How many steps a run has, and which window of which epoch each step is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from leantune.config.schema import ScheduleSection, TrainSection
from leantune.errors import ConfigError


@dataclass(frozen=True)
class StepPlan:
    """The steps of a run. micro_batch_size is what one device runs at a time."""

    num_records: int
    global_batch_size: int
    micro_batch_size: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int

    def place(self, step: int) -> tuple[int, int]:
        """(epoch, window within the epoch) of a step; all count from 0."""
        return divmod(step, self.steps_per_epoch)

    def ends_epoch(self, done: int) -> bool:
        """Whether an epoch, or the run, ends after `done` steps."""
        return done % self.steps_per_epoch == 0 or done == self.total_steps


def plan_steps(train: TrainSection, num_records: int, devices: int) -> StepPlan:
    """Resolve batch sizes and step counts for a number of records and devices.

    A step with fewer records than all devices could take at once is shared out evenly.
    """
    per_pass = train.micro_batch_size * devices
    global_batch_size = train.global_batch_size or per_pass * (train.gradient_accumulation_steps or 1)
    steps_per_epoch = math.ceil(num_records / global_batch_size)
    total_steps = math.ceil(train.epochs * steps_per_epoch - 1e-9)
    if train.max_steps is not None:
        total_steps = min(total_steps, train.max_steps)
    return StepPlan(
        num_records=num_records,
        global_batch_size=global_batch_size,
        micro_batch_size=min(train.micro_batch_size, math.ceil(global_batch_size / devices)),
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        warmup_steps=_warmup_steps(train.schedule, total_steps),
    )


def _warmup_steps(schedule: ScheduleSection, total_steps: int) -> int:
    steps = schedule.warmup_steps
    if steps is None:
        steps = math.ceil((schedule.warmup_share or 0.0) * total_steps)
    if steps > total_steps:
        raise ConfigError(
            f"train.schedule.warmup_steps: {steps} is more than the {total_steps} steps of the whole run"
        )
    return steps
