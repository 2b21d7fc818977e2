"""Models of a run as training builds them: base, method, memory, weights, in the order of `train/build`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from leantune.config import RunConfig, validate
from leantune.config.grid import BASES, METHODS, REFT_METHODS, refusal
from leantune.strategies.process import World
from leantune.train.build import BuiltModel, build_model

ALONE = World(0, 0, 1, torch.device("cpu"))
# These differ from loreft in their formula alone, so that on packed bases it speaks for them.
LIKE_LOREFT = set(REFT_METHODS) - {"loreft"}
CELLS = [
    (method, base)
    for method in METHODS
    for base in BASES
    if refusal(method, base, "single") is None and not (method in LIKE_LOREFT and base != "dense")
]
# A tiny model has fewer blocks than Llama-Pro adds by default.
SETTINGS: dict[str, dict[str, Any]] = {"llama_pro": {"blocks": 1}}


def cell_config(model: Path, method: str, base: Any = "dense", **train: Any) -> RunConfig:
    """A run on the CPU whose data nobody reads; `base`: a name or a section, `train`: keys of its section."""
    return validate(
        {
            "model": str(model),
            "data": {"train": "nothing.jsonl"},
            "method": {"name": method, **SETTINGS.get(method, {})},
            "base": base,
            "train": {"device": "cpu", **train},
        }
    )


def built(model: Path, method: str, base: Any = "dense", **train: Any) -> BuiltModel:
    """The model of such a run, loaded and ready to train."""
    return build_model(cell_config(model, method, base, **train), ALONE)
