"""Finds a base by the name of its file."""

from __future__ import annotations

import importlib

import torch
from transformers import PreTrainedModel

from leantune.models.source import ModelSource


def load_base(
    name: str,
    source: ModelSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "auto",
) -> PreTrainedModel:
    """Load a model with its weights frozen and stored as the base `name` says."""
    module = importlib.import_module(f"leantune.bases.{name}")
    model: PreTrainedModel = module.load(source, dtype=dtype, device=device, attention=attention)
    return model.requires_grad_(False)
