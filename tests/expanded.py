"""Expanded tiny models in memory: built from the larger configuration, filled by the names of the smaller."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from leantune.models.expand import Expansion, expanded_config, plan_expansion
from tests.models import tiny_model


@torch.no_grad()
def expand_in_memory(model: PreTrainedModel, blocks: int) -> tuple[PreTrainedModel, Expansion]:
    """A frozen copy of a model with new blocks, and where its blocks come from."""
    expansion = plan_expansion(model.config, blocks)
    config = expanded_config(model.config, expansion)
    loader: Any = AutoModelForCausalLM
    wide: PreTrainedModel = loader.from_config(copy.deepcopy(config), dtype=model.dtype)
    names, values = expansion.names(wide), model.state_dict()
    state: dict[str, Tensor] = {}
    for name, tensor in wide.state_dict().items():
        source, zero = names(name)
        state[name] = torch.zeros_like(tensor) if zero else values[source]
    wide.load_state_dict(state)
    return wide.eval().requires_grad_(False), expansion


def tiny_expanded(
    architecture: str = "llama", blocks: int = 2, seed: int = 0, **changes: Any
) -> tuple[PreTrainedModel, PreTrainedModel, Expansion]:
    """A tiny model, the same with new blocks, and where those come from."""
    model = tiny_model(architecture, seed, **changes)
    return model, *expand_in_memory(model, blocks)
