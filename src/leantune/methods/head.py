"""A trained head on the final hidden state: classes of a text, or the reward of an answer.

It is no method by itself but a part of a run: it is attached beside an adapter and saved with it, in files
of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leantune.errors import CheckpointError, ConfigError
from leantune.methods.protocol import AdapterFiles, Attached, home, named_generator
from leantune.models.anatomy import decoder_blocks, text_config

CONFIG_FILE = "head_config.json"
TENSORS_FILE = "head.safetensors"
_FORMAT, _VERSION = "leantune-head", 1
_MODULE = "task_head"
_INIT_STD = 0.02  # as transformers starts its heads


class TaskHead(nn.Module):
    """A linear layer in fp32, whatever computes the hidden states. `bias` only for classes."""

    def __init__(self, num_outputs: int, dim: int, generator: torch.Generator, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(_INIT_STD * torch.randn(num_outputs, dim, generator=generator))
        self.bias = nn.Parameter(torch.zeros(num_outputs)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., d]; returns [..., outputs] in the type of the weight."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


class AttachedHead(Attached):
    """The head on a model. `labels`: the class of each output; None: one output, a reward."""

    always_whole = True  # a handful of rows, read by every rank for its own records

    def __init__(self, model: nn.Module, labels: Sequence[str] | None, module: TaskHead) -> None:
        super().__init__("head", model)
        self.labels = None if labels is None else tuple(labels)
        self.module = module

    def own(self) -> set[str]:
        return {f"{_MODULE}.{name}" for name, _ in self.module.named_parameters()}

    def frozen_blocks(self) -> int:
        return len(decoder_blocks(self.model))

    def describe(self) -> list[str]:
        outputs, dim = self.module.weight.shape
        what = "reward" if self.labels is None else f"classes {', '.join(self.labels)}"
        return [f"trained head: {outputs} × {dim} ({what})"]

    def export(self) -> AdapterFiles:
        config = {
            "format": _FORMAT,
            "format_version": _VERSION,
            "objective": "reward" if self.labels is None else "classification",
            "labels": None if self.labels is None else list(self.labels),
            "hidden_size": int(self.module.weight.shape[1]),
        }
        tensors = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        return AdapterFiles(CONFIG_FILE, config, TENSORS_FILE, tensors)


def attach(model: nn.Module, *, seed: int, labels: Sequence[str] | None = None) -> AttachedHead:
    """Attach a head with an output for each of the labels, or with a single one: a reward."""
    dim, num_outputs = int(text_config(model).hidden_size), 1 if labels is None else len(labels)
    module = TaskHead(num_outputs, dim, named_generator(seed, _MODULE), bias=labels is not None)
    model.add_module(_MODULE, module.to(home(model)))
    return AttachedHead(model, labels, module)


def settings_from(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `attach` that a saved configuration asks for; `CheckpointError` if it is another."""
    labels = config.get("labels")
    known = config.get("format") == _FORMAT and config.get("format_version") == _VERSION
    if not known or (labels is None) != (config.get("objective") == "reward"):
        raise CheckpointError(
            f"{CONFIG_FILE}: format {config.get('format')!r} {config.get('format_version')!r} with objective "
            f"{config.get('objective')!r} is not a head of {_FORMAT} {_VERSION}"
        )
    return {"labels": labels}


def head_of(attached: Attached) -> AttachedHead | None:
    """The head among the parts of a run; None if it has none."""
    return next((part for part in attached.parts() if isinstance(part, AttachedHead)), None)


def refuse_writing(attached: Attached) -> None:
    """Raise `ConfigError` for a model whose head was trained and not its answers."""
    head = head_of(attached)
    if head is not None:
        verb = "reward(prompts, answers)" if head.labels is None else "classify(texts)"
        raise ConfigError(
            f"this model was trained with objective {head.export().config['objective']} and does not write "
            f"answers; ask leantune.load(RUN).{verb}, or leantune eval RUN"
        )
