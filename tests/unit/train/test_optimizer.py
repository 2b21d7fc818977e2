"""Optimizers and learning rates: what decays, and the exact rate of every step."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from leantune.train.optimizer import build_optimizer, build_schedule, set_learning_rate

NUMBERS: dict[str, Any] = {
    "learning_rate": 0.1,
    "betas": (0.9, 0.95),
    "eps": 1e-7,
    "weight_decay": 0.5,
    "momentum": 0.9,
    "rho": 0.8,
}


def parameters() -> dict[str, nn.Parameter]:
    return {
        "matrix": nn.Parameter(torch.ones(2, 2)),
        "bias": nn.Parameter(torch.ones(2)),
        "rotation": nn.Parameter(torch.ones(2, 2)),
    }


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "adadelta"])
def test_weight_decay_spares_what_must_not_decay(name: str) -> None:
    """With gradients of zero, decay is all that moves a parameter."""
    trainable = parameters()
    optimizer = build_optimizer(trainable, {"bias", "rotation"}, name=name, **NUMBERS)
    for parameter in trainable.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert bool((trainable["matrix"] < 1).all())
    assert torch.equal(trainable["bias"], torch.ones(2))
    assert torch.equal(trainable["rotation"], torch.ones(2, 2))


def test_every_parameter_is_in_exactly_one_group() -> None:
    trainable = parameters()
    for spared in (set[str](), {"bias"}, set(trainable)):
        optimizer = build_optimizer(trainable, spared, name="adamw", **NUMBERS)
        members = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert sorted(members) == sorted(map(id, trainable.values()))
        assert all(group["params"] for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("adamw", torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-7}),
        ("adam", torch.optim.Adam, {"betas": (0.9, 0.95), "eps": 1e-7}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9}),
        ("adadelta", torch.optim.Adadelta, {"rho": 0.8, "eps": 1e-7}),
    ],
)
def test_the_numbers_of_the_configuration_reach_the_optimizer(
    name: str, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    optimizer = build_optimizer(parameters(), {"bias"}, name=name, **NUMBERS)
    assert type(optimizer) is kind
    for group in optimizer.param_groups:
        assert {key: group[key] for key in options} == options
        assert group["lr"] == 0.1
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]


def rates(name: str, total: int, warmup: int = 0, floor: float = 0.0) -> list[float]:
    schedule = build_schedule(name, 2.0, total, warmup, floor)
    return [schedule(step) for step in range(total)]


def test_a_constant_rate_is_the_same_float_at_every_step() -> None:
    """A rate that is set anew in each step costs time on some devices, and drifts by rounding."""
    assert rates("constant", 7) == [2.0] * 7


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_warm_up_rises_evenly_to_the_full_rate(name: str) -> None:
    """The first step must not be lost to a rate of zero."""
    warm = rates(name, 10, warmup=4)
    assert warm[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert warm[4] == 2.0
    assert rates(name, 4, warmup=4) == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_linear_and_cosine_fall_as_they_are_named() -> None:
    assert rates("linear", 4) == pytest.approx([2.0, 1.5, 1.0, 0.5])
    assert rates("cosine", 4) == pytest.approx([1 + math.cos(math.pi * step / 4) for step in range(4)])
    assert rates("linear", 6, warmup=2) == pytest.approx([1.0, 2.0, 2.0, 1.5, 1.0, 0.5])


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_floor_is_where_the_rate_ends(name: str) -> None:
    schedule = build_schedule(name, 2.0, 100, 10, 0.25)
    falling = [schedule(step) for step in range(10, 101)]
    assert falling[0] == 2.0
    assert falling[-1] == pytest.approx(0.5)
    assert all(a > b for a, b in itertools.pairwise(falling))
    assert rates(name, 50, floor=1.0) == pytest.approx([2.0] * 50)


def test_rates_depend_on_the_step_alone() -> None:
    """Case 6: a schedule that counts its calls is somewhere else after a resume."""
    schedule = build_schedule("cosine", 2.0, 20, 5, 0.1)
    forwards = [schedule(step) for step in range(20)]
    assert [schedule(step) for step in reversed(range(20))] == forwards[::-1]


def test_the_rate_is_set_on_all_groups() -> None:
    optimizer = build_optimizer(parameters(), {"bias"}, name="adamw", **NUMBERS)
    set_learning_rate(optimizer, 0.025)
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025]
