"""Optimizer state by name: a resumed run must go on bit for bit, in any order of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from leantune.checkpoint.optimizer_state import load_optimizer, optimizer_tensors
from leantune.checkpoint.store import CheckpointStore
from leantune.errors import CheckpointError

SHAPES = {"a.weight": (4, 3), "a.bias": (4,), "b/odd.weight": (2, 4), "scale": ()}

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
    "adamw_fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True),
    "adamw_plain": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=False, fused=False),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2),
    "sgd_momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, lr=1.0),
}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = {n: Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in SHAPES.items()}
    made["transposed"] = Parameter(torch.randn(3, 5, generator=generator).to(dtype).T)
    return made


def train(named: Mapping[str, Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for index, (name, parameter) in enumerate(sorted(named.items())):
            generator = torch.Generator().manual_seed(100 * step + index)
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = (
                None if name == "scale" and step < 2 else torch.empty_like(parameter).copy_(gradient)
            )
        optimizer.step()


def by_parameter(named: Mapping[str, Parameter]) -> dict[Parameter, str]:
    return {parameter: name for name, parameter in named.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MAKERS)
def test_resumed_equals_uninterrupted(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """Through the disk, with other groups and another order, and a parameter without state yet."""
    whole = parameters(dtype)
    train(whole, MAKERS[kind](list(whole.values())), range(6))

    first = parameters(dtype)
    optimizer = MAKERS[kind](list(first.values()))
    train(first, optimizer, range(2))
    tensors, scalars = optimizer_tensors(optimizer, by_parameter(first))
    assert all(name.startswith("optimizer/") for name in tensors)
    checkpoints = CheckpointStore(tmp_path, keep=1)
    weights = {f"parameters/{name}": parameter for name, parameter in first.items()}
    checkpoints.save(2, {**weights, **tensors}, {"optimizer": scalars})

    checkpoint, _ = checkpoints.newest()
    assert checkpoint is not None
    second = parameters(dtype)
    with torch.no_grad():
        for name, parameter in second.items():
            parameter.copy_(checkpoint.tensors[f"parameters/{name}"])
    backwards = list(reversed(second.values()))
    resumed = MAKERS[kind]([{"params": backwards[:2]}, {"params": backwards[2:]}])
    load_optimizer(resumed, by_parameter(second), checkpoint.tensors, checkpoint.state["optimizer"])
    for name, parameter in second.items():
        for key, value in resumed.state[parameter].items():
            before = optimizer.state[first[name]][key]
            assert value.dtype == before.dtype
            assert value.stride() == before.stride(), f"{name}/{key}: fused kernels need the same strides"
    train(second, resumed, range(2, 6))
    for name in whole:
        assert torch.equal(second[name], whole[name]), name


def test_plain_step_numbers_survive() -> None:
    """Some optimizers count steps in a Python number; it must not become a tensor or get lost."""
    named = {"w": Parameter(torch.zeros(3))}
    optimizer = torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)
    optimizer.state[named["w"]] = {"step": 7, "momentum_buffer": torch.ones(3), "note": None}
    tensors, scalars = optimizer_tensors(optimizer, by_parameter(named))
    assert list(tensors) == ["optimizer/w/momentum_buffer"]
    fresh = torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)
    load_optimizer(fresh, by_parameter(named), tensors, scalars)
    assert fresh.state[named["w"]]["step"] == 7
    assert fresh.state[named["w"]]["note"] is None


def test_loaded_state_is_a_copy() -> None:
    named = parameters()
    optimizer = MAKERS["adamw"](list(named.values()))
    train(named, optimizer, range(3))
    tensors, scalars = optimizer_tensors(optimizer, by_parameter(named))
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    fresh_named = parameters()
    fresh = MAKERS["adamw"](list(fresh_named.values()))
    load_optimizer(fresh, by_parameter(fresh_named), tensors, scalars)
    train(fresh_named, fresh, range(3, 5))
    assert all(torch.equal(tensors[name], kept[name]) for name in kept)


def saved_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    named = parameters()
    optimizer = MAKERS["adamw"](list(named.values()))
    train(named, optimizer, range(3))
    return optimizer_tensors(optimizer, by_parameter(named))


def refuse(
    named: dict[str, Parameter], kind: str, tensors: dict[str, Tensor], scalars: Any, message: str
) -> None:
    optimizer = MAKERS[kind](list(named.values()))
    train(named, optimizer, range(2))
    before = {n: dict(optimizer.state[p]) for n, p in named.items()}
    with pytest.raises(CheckpointError, match=message):
        load_optimizer(optimizer, by_parameter(named), tensors, scalars)
    assert {n: dict(optimizer.state[p]) for n, p in named.items()} == before, (
        "a refused load changed something"
    )


def test_names_that_do_not_match_are_listed() -> None:
    tensors, scalars = saved_state()
    named = parameters()
    named["c.weight"] = named.pop("a.weight")
    refuse(named, "adamw", tensors, scalars, r"missing c\.weight; unexpected a\.weight")


def test_a_shape_or_dtype_that_does_not_match_is_named() -> None:
    tensors, scalars = saved_state()
    named = parameters()
    named["a.bias"] = Parameter(torch.zeros(5))
    refuse(named, "adamw", tensors, scalars, r"a\.bias has shape \[5\], saved was \[4\]")
    refuse(
        parameters(torch.bfloat16), "adamw", tensors, scalars, r"is torch\.bfloat16, but its saved exp_avg"
    )
    wrong = {**tensors, "optimizer/a.bias/exp_avg": torch.zeros(3)}
    refuse(parameters(), "adamw", wrong, scalars, r"a\.bias/exp_avg has shape \[3\]")


def test_lost_or_extra_tensors_are_named() -> None:
    tensors, scalars = saved_state()
    lost = {name: tensor for name, tensor in tensors.items() if name != "optimizer/scale/exp_avg_sq"}
    refuse(parameters(), "adamw", lost, scalars, "missing optimizer/scale/exp_avg_sq")
    extra = {**tensors, "optimizer/scale/momentum": torch.zeros(())}
    refuse(parameters(), "adamw", extra, scalars, "unexpected optimizer/scale/momentum")


def test_another_optimizer_is_refused() -> None:
    tensors, scalars = saved_state()
    refuse(parameters(), "sgd", tensors, scalars, "state of AdamW, but the run uses SGD")
    refuse(parameters(), "adamw", tensors, {}, "no optimizer state")


def test_a_parameter_without_a_name_of_its_own_is_refused() -> None:
    named = parameters()
    optimizer = MAKERS["sgd"]([*named.values(), nn.Parameter(torch.zeros(2, 9))])
    with pytest.raises(CheckpointError, match=r"shape \[2, 9\] in the optimizer has no name"):
        optimizer_tensors(optimizer, by_parameter(named))
    same = dict.fromkeys(named.values(), "w")
    with pytest.raises(CheckpointError, match="shares the name 'w'"):
        optimizer_tensors(MAKERS["sgd"](list(named.values())), same)
