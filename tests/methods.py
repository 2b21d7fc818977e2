"""Tiny models ready for a method, in memory: Llama-Pro wants one that was expanded, the others any."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from leantune.methods import Attached, attach
from tests.expanded import tiny_expanded
from tests.models import tiny_model

NEW_BLOCKS = 2
# Settings without which a method cannot be attached to a tiny model.
NEEDED: dict[str, dict[str, Any]] = {"llama_pro": {"blocks": NEW_BLOCKS}}


def model_for(method: str, architecture: str = "llama", **changes: Any) -> PreTrainedModel:
    """A tiny model that the method can be attached to."""
    if method == "llama_pro":
        return tiny_expanded(architecture, NEW_BLOCKS, **changes)[1]
    return tiny_model(architecture, **changes)


def attached_to(
    method: str, architecture: str = "llama", *, seed: int = 0, model: Any = None, **settings: Any
) -> Attached:
    """The method on a tiny model of its own, or on `model` if that is given."""
    model = model_for(method, architecture) if model is None else model
    return attach(method, model, {**NEEDED.get(method, {}), **settings}, seed)
