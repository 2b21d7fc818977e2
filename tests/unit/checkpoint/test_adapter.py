"""What was trained replaces an older folder only when the disk has given it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leantune.checkpoint import adapter
from leantune.checkpoint.adapter import read_tensors, save_trained
from leantune.errors import CheckpointError
from leantune.methods import attach
from tests.batches import shake
from tests.fixtures import tiny_tokenizer
from tests.models import tiny_model


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_bad_write_leaves_the_good_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison came after the swap, so that the good adapter was already gone."""
    attached = attach("lora", tiny_model(), {"rank": 2}, seed=0)
    folder = tmp_path / "adapter"
    save_trained(attached, folder, tiny_tokenizer(), "some/base", None)
    before = everything(folder)
    shake(attached)
    real: Any = adapter.save_file

    def damaged(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
        first = sorted(tensors)[0]
        real({**tensors, first: tensors[first] + 1}, path, **options)

    monkeypatch.setattr(adapter, "save_file", damaged)
    with pytest.raises(CheckpointError, match=r"adapter was not kept: .*lora_A.* differ from memory"):
        save_trained(attached, folder, tiny_tokenizer(), "some/base", None)
    assert everything(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_an_adapter_with_odd_numbers_is_saved_as_it_is(tmp_path: Path) -> None:
    """A NaN is not equal to itself, so that a faithful copy was called a bad one."""
    attached = attach("lora", tiny_model(), {"rank": 2}, seed=0)
    name, parameter = next(iter(attached.trainable().items()))
    with torch.no_grad():
        parameter[0, :2] = torch.tensor([float("nan"), -0.0])
    line = save_trained(attached, tmp_path / "adapter", tiny_tokenizer(), "some/base", None)
    assert "equal to memory bit for bit" in line
    tensors, _ = read_tensors(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(bool(tensor.isnan().any()) for tensor in tensors.values()), name


def test_a_bad_write_leaves_the_good_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for whole models."""
    attached = attach("full", tiny_model(), {}, seed=0)
    model: Any = attached.model
    folder = tmp_path / "model"
    save_trained(attached, folder, tiny_tokenizer(vocab_size=300), "some/base", None)
    before = everything(folder)
    real = model.save_pretrained

    def damaged(target: Path, state_dict: dict[str, Tensor]) -> None:
        first = state_dict["lm_head.weight"].clone()
        first[0, 0] += 1
        real(target, state_dict={**state_dict, "lm_head.weight": first})

    monkeypatch.setattr(model, "save_pretrained", damaged)
    with pytest.raises(CheckpointError, match=r"model was not kept: .*lm_head\.weight differ from memory"):
        save_trained(attached, folder, tiny_tokenizer(vocab_size=300), "some/base", None)
    assert everything(folder) == before
