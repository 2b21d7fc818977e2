"""Weights in floating point, as they are in the checkpoint or cast once."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from leantune.errors import ModelError
from leantune.models.source import ModelSource


def load(source: ModelSource, *, dtype: torch.dtype, device: torch.device, attention: str) -> PreTrainedModel:
    """Read a model from safetensors onto `device`.

    Raises `ModelError` if it cannot be read, if its weights are pickled (`.bin`) only, or if
    weights are missing.
    """
    options = dict(source.options)
    loader: Any = AutoModelForCausalLM
    model: Any
    report: dict[str, Any]
    if attention != "auto":
        options["attn_implementation"] = attention
    try:
        model, report = loader.from_pretrained(
            source.location,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelError(
            f"model.name: cannot load {source.name}: {error} (only safetensors are read, never pickled "
            "weights; convert a .bin model with transformers' save_pretrained)"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"model.name: {source.name} lacks {len(missing)} weights of {type(model).__name__}: "
            f"{', '.join(missing[:5])}; it is not a complete causal language model"
        )
    return model.to(device)
