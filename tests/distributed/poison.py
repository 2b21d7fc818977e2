"""A model with one bad token."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.fixtures import tiny_model_folder


def poisoned_model(folder: Path, token: int) -> Path:
    """A tiny model folder whose losses are NaN from the first such token of a record on."""
    tiny_model_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
