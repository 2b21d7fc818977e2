"""The optimizer and its learning rate."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from leantune.errors import ConfigError

# Optimizers of bitsandbytes (arXiv 2110.02861), and what the class is called there.
BITSANDBYTES = {
    "adamw_8bit": "AdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
}
Schedule = Callable[[int], float]


def build_optimizer(
    trainable: Mapping[str, nn.Parameter],
    decay_free: set[str],
    *,
    name: str,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    momentum: float,
    rho: float,
) -> torch.optim.Optimizer:
    """An optimizer over named parameters; weight decay spares those in `decay_free`."""
    decayed = [p for n, p in trainable.items() if n not in decay_free]
    spared = [p for n, p in trainable.items() if n in decay_free]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if name in BITSANDBYTES:
        options: dict[str, Any] = {"betas": betas, "eps": eps}
        return _of_bitsandbytes(name, trainable)(groups, lr=learning_rate, **options)
    kinds: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, {"betas": betas, "eps": eps, "fused": True}),
        "adam": (torch.optim.Adam, {"betas": betas, "eps": eps, "fused": True}),
        "sgd": (torch.optim.SGD, {"momentum": momentum}),
        "adadelta": (torch.optim.Adadelta, {"rho": rho, "eps": eps}),
    }
    kind, options = kinds[name]
    return kind(groups, lr=learning_rate, **options)


def _of_bitsandbytes(
    name: str, trainable: Mapping[str, nn.Parameter]
) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer class of bitsandbytes."""
    check_optimizer(name, {p.device.type for p in trainable.values()})
    return getattr(importlib.import_module("bitsandbytes").optim, BITSANDBYTES[name])


def check_optimizer(name: str, devices: Collection[str]) -> None:
    """Raise `ConfigError` if an optimizer's package is missing, or if it would not obey on these devices."""
    if name not in BITSANDBYTES:
        return
    if name.startswith("paged") and set(devices) != {"cuda"}:
        raise ConfigError(
            f"train.optimizer.name: {name} pages optimizer states between GPU and host memory, and the "
            "trained parameters are in host memory already; use adamw or adamw_8bit"
        )
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of kernels that are not wanted here
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigError(
            f"train.optimizer.name: {name} needs bitsandbytes, which is not installed; "
            '`uv pip install "leantune[bitsandbytes]"` brings it'
        ) from error


def build_schedule(
    name: str, learning_rate: float, total_steps: int, warmup_steps: int, floor: float
) -> Schedule:
    """The learning rate of step s, counted from 0.

    Warm-up rises in equal parts to the full rate at step warmup_steps - 1; linear and cosine
    then fall towards `floor` times the rate, which the step after the last would have. A
    constant rate without warm-up is the same number at every step, so nothing is ever set.
    """

    def rate(step: int) -> float:
        if step < warmup_steps:
            return learning_rate * (step + 1) / warmup_steps
        if name == "constant":
            return learning_rate
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        shape = 1.0 - progress if name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return learning_rate * (floor + (1.0 - floor) * shape)

    return rate


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all groups, if it is not that already."""
    for group in optimizer.param_groups:
        if group["lr"] != rate:
            group["lr"] = rate
