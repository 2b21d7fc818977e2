"""How many steps a run has, where each one is in the data, and how batches are seeded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from leantune.config.schema import TrainSection
from leantune.data.encode import random_records
from leantune.errors import ConfigError
from leantune.models.precision import PRECISIONS
from leantune.strategies.process import World
from leantune.train.run import LoopSettings, Run
from leantune.train.steps import StepPlan, plan_steps


def plan(num_records: int, devices: int = 1, **train: Any) -> StepPlan:
    return plan_steps(TrainSection.model_validate(train), num_records, devices)


@pytest.mark.parametrize(
    ("records", "devices", "train", "batch", "per_epoch", "total"),
    [
        (100, 1, {"micro_batch_size": 4}, 4, 25, 25),
        (100, 2, {"micro_batch_size": 4}, 8, 13, 13),
        (100, 2, {"micro_batch_size": 4, "gradient_accumulation_steps": 3}, 24, 5, 5),
        (100, 2, {"micro_batch_size": 4, "global_batch_size": 16, "epochs": 2.0}, 16, 7, 14),
        (5, 2, {"micro_batch_size": 2}, 4, 2, 2),
        (1, 4, {"micro_batch_size": 8}, 32, 1, 1),
        (28, 1, {"micro_batch_size": 4, "gradient_accumulation_steps": 4}, 16, 2, 2),
        (100, 1, {"micro_batch_size": 4, "epochs": 0.5}, 4, 25, 13),
        (100, 1, {"micro_batch_size": 4, "epochs": 0.2}, 4, 25, 5),
        (30, 1, {"micro_batch_size": 3, "epochs": 0.3}, 3, 10, 3),
        (100, 1, {"micro_batch_size": 4, "epochs": 1.1}, 4, 25, 28),
        (100, 1, {"micro_batch_size": 4, "epochs": 0.001}, 4, 25, 1),
        (100, 1, {"micro_batch_size": 4, "max_steps": 7}, 4, 25, 7),
        (100, 1, {"micro_batch_size": 4, "max_steps": 70}, 4, 25, 25),
        (100, 1, {"micro_batch_size": 4, "epochs": 3.0, "max_steps": 70}, 4, 25, 70),
    ],
)
def test_steps_count_tails_and_devices(
    records: int, devices: int, train: dict[str, Any], batch: int, per_epoch: int, total: int
) -> None:
    """Case 8: the tail of an epoch is a step of its own, on any number of devices."""
    found = plan(records, devices, **train)
    assert (found.global_batch_size, found.steps_per_epoch, found.total_steps) == (batch, per_epoch, total)


def test_places_and_ends_of_epochs() -> None:
    found = plan(10, micro_batch_size=4, epochs=2.5)
    assert (found.steps_per_epoch, found.total_steps) == (3, 8)
    assert [found.place(step) for step in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [done for done in range(1, 9) if found.ends_epoch(done)] == [3, 6, 8]


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ({}, 0),
        ({"warmup_steps": 5}, 5),
        ({"warmup_share": 0.1}, 3),
        ({"warmup_share": 0.0}, 0),
        ({"warmup_steps": 25}, 25),
    ],
)
def test_warm_up_in_steps_or_as_a_share(schedule: dict[str, Any], steps: int) -> None:
    assert plan(100, micro_batch_size=4, schedule=schedule).warmup_steps == steps


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="26 is more than the 25 steps of the whole run"):
        plan(100, micro_batch_size=4, schedule={"warmup_steps": 26})


def run_on(num_records: int, seed: int = 3, **train: Any) -> Run:
    """The part of a run that finds its records; nothing of a model is needed for that."""
    settings = LoopSettings(
        seed=seed,
        group_by_length=True,
        max_grad_norm=None,
        precision=PRECISIONS["fp32"],
        eval_every_steps=None,
        eval_micro_batch_size=1,
        keep_best=True,
        patience=None,
        min_delta=0.0,
        checkpoint_every_steps=None,
    )
    parts: dict[str, Any] = dict.fromkeys(Run.__dataclass_fields__)
    parts.pop("_epoch")
    parts |= {
        "world": World(rank=0, local_rank=0, size=1, device=torch.device("cpu")),
        "train_records": random_records(num_records, 12, list(range(3, 60)), 0),
        "pad_id": 0,
        "plan": plan(num_records, **train),
        "settings": settings,
    }
    return Run(**parts)


def sample_ids(run: Run, step: int) -> list[int]:
    window = run.window(step)
    return [i for n in range(len(window.chunks)) for i in run.micro_batch(window, n, step).sample_ids]


def test_each_epoch_shows_every_record_once_through_the_run() -> None:
    run = run_on(22, micro_batch_size=2, global_batch_size=8, epochs=2.0)
    epochs = [[i for step in range(e * 3, e * 3 + 3) for i in sample_ids(run, step)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(22))
    assert epochs[0] != epochs[1]


def test_a_step_finds_its_records_without_the_steps_before_it() -> None:
    """Case 6: a resumed run starts in the middle of an epoch, and sees what it would have seen."""
    straight = run_on(22, micro_batch_size=2, global_batch_size=8, epochs=2.0)
    expected = [sample_ids(straight, step) for step in range(6)]
    for step in (4, 1, 5):
        assert (
            sample_ids(run_on(22, micro_batch_size=2, global_batch_size=8, epochs=2.0), step)
            == expected[step]
        )


@pytest.mark.parametrize("micro", [1, 2, 8])
def test_windows_do_not_depend_on_the_micro_batch_size(micro: int) -> None:
    run = run_on(22, micro_batch_size=micro, global_batch_size=8)
    reference = run_on(22, micro_batch_size=4, global_batch_size=8)
    for step in range(3):
        assert sorted(sample_ids(run, step)) == sorted(sample_ids(reference, step))


def test_every_micro_batch_has_a_seed_of_its_own_that_repeats() -> None:
    """One seed for all would drop the same units in every micro-batch."""

    def seeds(seed: int) -> list[int]:
        run = run_on(40, seed, micro_batch_size=2, global_batch_size=8)
        return [run.micro_batch(run.window(step), n, step).seed for step in range(5) for n in range(4)]

    assert len(set(seeds(3))) == 20
    assert seeds(3) == seeds(3)
    assert not set(seeds(3)) & set(seeds(4))


def test_sample_ids_are_those_of_the_records() -> None:
    run = run_on(10, micro_batch_size=4)
    window = run.window(0)
    batch = run.micro_batch(window, 0, 0)
    expected = run.train_records.sample_ids[np.asarray(window.chunks[0])].tolist()
    assert list(batch.sample_ids) == expected


@pytest.mark.parametrize(("devices", "expected"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_a_small_step_is_shared_out_between_the_devices(devices: int, expected: int) -> None:
    """Four records in micro-batches of four left all devices but one idle."""
    train = TrainSection(micro_batch_size=4, global_batch_size=4)
    assert plan_steps(train, num_records=40, devices=devices).micro_batch_size == expected
