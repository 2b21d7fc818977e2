"""Merging: the merged model says what the adapter said, or there is no merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import leantune
from leantune.bases import load_base
from leantune.checkpoint.adapter import save_trained
from leantune.checkpoint.merge import fold_into_weights, merge_run
from leantune.checkpoint.trained import load_trained
from leantune.errors import CheckpointError
from leantune.methods import attach
from leantune.methods.factors import AttachedFactors
from leantune.models.anatomy import linears
from leantune.models.packed import PackedLinear
from leantune.models.source import resolve_model
from tests.batches import logits_of, shake, small_batch
from tests.fixtures import tiny_model_folder, tiny_tokenizer
from tests.models import ARCHITECTURES, save_tiny, tiny_model

BATCH = small_batch()


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_folded_weights_give_the_adapters_logits(method: str, architecture: str) -> None:
    """GPT-2 keeps its linear weights transposed; an update added as it is would fit square ones."""
    attached = attach(method, tiny_model(architecture), {"rank": 4, "rslora": True}, seed=0)
    assert isinstance(attached, AttachedFactors)
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
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_adapter_folder_merges_into_a_model_folder(method: str, architecture: str, tmp_path: Path) -> None:
    _, adapter = _adapter(tmp_path, architecture, method, rank=4)
    lines = merge_run(adapter, tmp_path / "merged")
    assert "equal to memory bit for bit" in lines[0]
    assert lines[1].startswith("logits of the merged model equal the adapter's on 4 samples")
    model = load_base("dense", resolve_model(str(tmp_path / "merged")))
    attached = attach(method, tiny_model(architecture), {"rank": 4}, seed=0)
    shake(attached)
    merged = attach("full", model, {}, seed=0)
    torch.testing.assert_close(logits_of(merged, BATCH), logits_of(attached, BATCH), rtol=1e-4, atol=1e-5)
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


@pytest.mark.parametrize(("method", "base"), [("lora", "nf4"), ("dora", "nf4"), ("dora", "hqq")])
def test_a_run_on_a_packed_base_merges_into_the_weights_it_was_trained_against(
    method: str, base: str, tmp_path: Path
) -> None:
    """An update that was learnt on rounded weights does not fit those of the checkpoint."""
    model = tiny_model_folder(tmp_path / "base")
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"SELECT name WHERE age > {i}", "completion": f"there are {i}"} for i in range(8)]
    data.write_text("\n".join(map(json.dumps, rows)))
    config = {
        "model": str(model),
        "data": {"train": str(data), "format": "prompt_completion"},
        "method": {"name": method, "rank": 4},
        "base": {"name": base},
        "train": {"max_steps": 2, "micro_batch_size": 4, "global_batch_size": 4, "learning_rate": 1e-2},
        "output": {"dir": str(tmp_path / "run")},
    }
    leantune.train(config, quiet=True)
    lines = merge_run(tmp_path / "run", tmp_path / "merged")
    assert f"come from the {base} base that was trained against" in lines[1]
    merged = load_base("dense", resolve_model(str(tmp_path / "merged")))
    original = load_base("dense", resolve_model(str(model)))
    trained = load_trained(tmp_path / "run", device="cpu")
    for name, layer in linears(trained.model).items():
        weight = merged.get_submodule(name).weight
        if isinstance(layer, PackedLinear):
            factors: Any = getattr(layer, method)
            torch.testing.assert_close(weight, factors.fold(layer.dequantise()), rtol=1e-6, atol=1e-7)
            wrong = factors.fold(original.get_submodule(name).weight)
            assert not torch.allclose(weight, wrong, atol=1e-4)  # pyright: ignore[reportArgumentType]


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
    merged: Any = load_base("dense", resolve_model(str(tmp_path / "merged")))
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert torch.equal(merged.lm_head.weight, model.lm_head.weight)
