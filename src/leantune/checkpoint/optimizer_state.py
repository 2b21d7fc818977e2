"""The state of an optimizer by parameter name, so that it fits any order, grouping and number of ranks.

Tensors are named `optimizer/<parameter>/<key>`. Settings of the groups (learning rate, betas)
are not part of it: they follow from the run's configuration and schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from leantune.errors import CheckpointError

PREFIX = "optimizer/"
# States of 8-bit optimizers that go by blocks of the parameter (bitsandbytes).
_BLOCKWISE = ("absmax", "qmap")


def optimizer_tensors(
    optimizer: Optimizer, names: Mapping[Parameter, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's tensors by name (not copied), and the plain values that JSON can hold.

    Raises `CheckpointError` if a parameter has no name of its own.
    """
    tensors: dict[str, Tensor] = {}
    described: dict[str, Any] = {}
    for name, (parameter, _) in _by_name(optimizer, names).items():
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        kept = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        tensors |= {f"{PREFIX}{name}/{key}": value for key, value in kept.items()}
        described[name] = {
            "shape": list(parameter.shape),
            "tensors": sorted(kept),
            "values": {key: value for key, value in state.items() if key not in kept},
        }
    return tensors, {"class": type(optimizer).__name__, "parameters": described}


def load_optimizer(
    optimizer: Optimizer,
    names: Mapping[Parameter, str],
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> None:
    """Give the optimizer the state that `optimizer_tensors` took, bit for bit; tensors are copied.

    Other entries of `tensors` are left alone. Raises `CheckpointError`, before anything is changed,
    if the class, the parameter names, a shape or a dtype is not the same.
    """
    targets = _by_name(optimizer, names)
    if not {"class", "parameters"} <= scalars.keys():
        raise CheckpointError("the checkpoint holds no optimizer state that leantune wrote")
    saved: Mapping[str, Any] = scalars["parameters"]
    if scalars["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint holds the state of {scalars['class']}, but the run uses "
            f"{type(optimizer).__name__}; resume with the train.optimizer it was saved with"
        )
    _check_names("parameters", set(targets), set(saved))
    expected = {f"{PREFIX}{name}/{key}" for name, entry in saved.items() for key in entry["tensors"]}
    _check_names("tensors", expected, {name for name in tensors if name.startswith(PREFIX)})
    problems = [
        problem
        for name, (parameter, _) in targets.items()
        for problem in _misfits(name, parameter, saved[name], tensors)
    ]
    if problems:
        raise CheckpointError(f"the optimizer state does not fit this model: {_listed(problems)}")
    optimizer.state.clear()
    for name, (parameter, group) in targets.items():
        state = dict(saved[name]["values"])
        for key in saved[name]["tensors"]:
            state[key] = _placed(tensors[f"{PREFIX}{name}/{key}"], key, parameter, group)
        if state:
            optimizer.state[parameter] = state


def _by_name(
    optimizer: Optimizer, names: Mapping[Parameter, str]
) -> dict[str, tuple[Parameter, dict[str, Any]]]:
    """Each parameter of the optimizer with its group."""
    found: dict[str, tuple[Parameter, dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(parameter)
            if name is None or name in found:
                what = "has no name" if name is None else f"shares the name {name!r} with another one"
                raise CheckpointError(
                    f"a parameter of shape {list(parameter.shape)} in the optimizer {what}; "
                    "its state could not be saved or restored"
                )
            found[name] = (parameter, group)
    return found


def _check_names(what: str, expected: set[str], present: set[str]) -> None:
    missing, unexpected = sorted(expected - present), sorted(present - expected)
    parts = [f"missing {_listed(missing)}"] * bool(missing)
    parts += [f"unexpected {_listed(unexpected)}"] * bool(unexpected)
    if parts:
        raise CheckpointError(f"the {what} of the optimizer state do not match: {'; '.join(parts)}")


def _misfits(
    name: str, parameter: Parameter, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> list[str]:
    """What keeps one parameter's state from fitting: its shape or its dtype."""
    if entry["shape"] != list(parameter.shape):
        return [f"{name} has shape {list(parameter.shape)}, saved was {entry['shape']}"]
    problems: list[str] = []
    for key in entry["tensors"]:
        value = tensors[f"{PREFIX}{name}/{key}"]
        if key.startswith(_BLOCKWISE):
            continue
        if value.ndim and value.shape != parameter.shape:
            problems.append(f"{name}/{key} has shape {list(value.shape)}, not {entry['shape']} or a number")
        elif key != "step" and value.is_floating_point() and value.dtype != parameter.dtype:
            problems.append(f"{name} is {parameter.dtype}, but its saved {key} is {value.dtype}")
    return problems


def _placed(value: Tensor, key: str, parameter: Parameter, group: Mapping[str, Any]) -> Tensor:
    """A copy where the optimizer would have made it itself."""
    if key == "step":
        # Only fused and capturable kernels count steps on the device.
        on_device = group.get("fused") or group.get("capturable")
        return value.detach().to(parameter.device if on_device else "cpu", copy=True)
    if value.shape != parameter.shape:
        return value.detach().to(parameter.device, copy=True)
    # The strides must be the parameter's own: fused kernels walk both memories side by side.
    made = torch.empty_like(parameter, dtype=value.dtype, memory_format=torch.preserve_format)
    return made.copy_(value)


def _listed(items: list[str], limit: int = 8) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
