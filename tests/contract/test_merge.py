"""Merging: the merged model says what the adapter said, or there is no merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from leantune.bases import load_base
from leantune.checkpoint.adapter import save_trained
from leantune.checkpoint.merge import fold_into_weights, merge_run
from leantune.errors import CheckpointError
from leantune.methods import attach
from leantune.methods.lora import AttachedLora
from leantune.models.source import resolve_model
from tests.batches import logits_of, shake, small_batch
from tests.fixtures import tiny_tokenizer
from tests.models import ARCHITECTURES, save_tiny, tiny_model

BATCH = small_batch()


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_folded_weights_give_the_adapters_logits(architecture: str) -> None:
    """GPT-2 keeps its linear weights transposed; an update added as it is would fit square ones."""
    attached = attach("lora", tiny_model(architecture), {"rank": 4, "rslora": True}, seed=0)
    assert isinstance(attached, AttachedLora)
    shake(attached)
    expected = logits_of(attached, BATCH)
    names = set(tiny_model(architecture).state_dict())
    fold_into_weights(attached)
    torch.testing.assert_close(logits_of(attached, BATCH), expected, rtol=1e-4, atol=1e-5)
    assert set(attached.model.state_dict()) == names
    assert not torch.allclose(
        expected, logits_of(attach("full", tiny_model(architecture), {}, seed=0), BATCH)
    )


def _adapter(tmp_path: Path, architecture: str, method: str, **settings: Any) -> tuple[Path, Path]:
    """(base folder, adapter folder) of a shaken adapter on disk."""
    tokenizer = tiny_tokenizer(vocab_size=300)
    base = save_tiny(tmp_path / "base", tokenizer, architecture)
    model = load_base("dense", resolve_model(str(base)))
    attached = attach(method, model, settings, seed=0)
    shake(attached)
    save_trained(attached, tmp_path / "adapter", tokenizer, str(base), None)
    return base, tmp_path / "adapter"


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "phi3", "mixtral"])
def test_an_adapter_folder_merges_into_a_model_folder(architecture: str, tmp_path: Path) -> None:
    _, adapter = _adapter(tmp_path, architecture, "lora", rank=4)
    lines = merge_run(adapter, tmp_path / "merged")
    assert "equal to memory bit for bit" in lines[0]
    assert lines[1].startswith("logits of the merged model equal the adapter's on 4 samples")
    model = load_base(
        "dense", resolve_model(str(tmp_path / "merged"))
    )
    attached = attach("lora", tiny_model(architecture), {"rank": 4}, seed=0)
    shake(attached)
    merged = attach("full", model, {}, seed=0)
    torch.testing.assert_close(logits_of(merged, BATCH), logits_of(attached, BATCH), rtol=1e-4, atol=1e-5)
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


def test_reft_cannot_be_merged_and_says_why(tmp_path: Path) -> None:
    _, adapter = _adapter(tmp_path, "llama", "loreft", rank=4)
    with pytest.raises(CheckpointError, match="edits hidden states at chosen prompt tokens") as caught:
        merge_run(adapter, tmp_path / "merged")
    assert "leantune generate" in str(caught.value)
    assert not (tmp_path / "merged").exists()


def test_merging_into_a_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    base, adapter = _adapter(tmp_path, "llama", "lora", rank=4)
    before = sorted(path.name for path in base.iterdir())
    with pytest.raises(CheckpointError, match="exists already"):
        merge_run(adapter, base)
    assert sorted(path.name for path in base.iterdir()) == before


def test_a_tied_head_stays_as_it_was(tmp_path: Path) -> None:
    """The head is no target, so merging must not pull head and embeddings apart."""
    tokenizer = tiny_tokenizer(vocab_size=300)
    base = save_tiny(tmp_path / "base", tokenizer, "llama", tie_word_embeddings=True)
    source = resolve_model(str(base))
    model: Any = load_base("dense", source)
    attached = attach("lora", model, {"rank": 4}, seed=0)
    shake(attached)
    save_trained(attached, tmp_path / "adapter", tokenizer, str(base), None)
    merge_run(tmp_path / "adapter", tmp_path / "merged")
    merged: Any = load_base(
        "dense", resolve_model(str(tmp_path / "merged"))
    )
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert torch.equal(merged.lm_head.weight, model.lm_head.weight)
