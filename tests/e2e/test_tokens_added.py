"""Case 20 as a user meets it: train with added tokens, load, evaluate, compare, merge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import leantune
from leantune.data.records import EncodedRecords
from leantune.errors import ModelError
from tests.fixtures import tiny_model_folder, tiny_tokenizer

ADDED = ["<act>", "<obs>"]
ROWS = len(tiny_tokenizer())
SAMPLING = leantune.Sampling(max_new_tokens=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "records.jsonl"
    rows = [{"prompt": f"<act>SELECT {i} name", "completion": f"there <obs> are {i}"} for i in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def config(model: Path, data: Path, folder: Path, method: str, **more: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(model), "add_tokens": ADDED},
        "data": {"train": str(data), "format": "prompt_completion"},
        "method": method if method == "full" else {"name": method, "train_embeddings": True},
        "train": {"epochs": 4.0, "micro_batch_size": 2, "global_batch_size": 4, "learning_rate": 1e-2},
        "output": {"dir": str(folder)},
        **more,
    }


@torch.no_grad()
def logits(loaded: leantune.Model) -> torch.Tensor:
    """Logits of a text with added tokens, as prompt edits and all see it."""
    trained = loaded.trained
    ids = torch.tensor([trained.tokenizer("<act> the <obs> name", add_special_tokens=False)["input_ids"]])
    assert {ROWS, ROWS + 1} <= set(ids[0].tolist())
    with trained.attached.edits(torch.tensor([ids.shape[1]])):
        return trained.model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", ["lora", "dora", "loreft", "full"])
def test_a_run_with_added_tokens_is_used_like_any_other(
    method: str, tied: bool, data: Path, tmp_path: Path
) -> None:
    base = tiny_model_folder(tmp_path / "base", tied=tied)
    result = leantune.train(config(base, data, tmp_path / "run", method), quiet=True)
    assert result is not None
    assert result.last_loss is not None
    assert result.first_loss is not None
    assert result.last_loss < result.first_loss
    records = EncodedRecords.load(result.folder / "records" / "train.safetensors")
    assert (records.tokens == ROWS).sum() == (records.tokens == ROWS + 1).sum() == 8

    loaded = leantune.load(result.folder, device="cpu")
    model: Any = loaded.trained.model
    assert model.config.vocab_size == ROWS + 2 == len(loaded.trained.tokenizer)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert len(loaded.generate("<act>SELECT 1 name", SAMPLING)) == 1
    untouched = leantune.load(base, device="cpu").trained.model
    moved = model.model.embed_tokens.weight[:ROWS] - untouched.model.embed_tokens.weight
    assert bool((moved != 0).any())

    if method != "full":  # the adapter alone, on a copy of its base
        shutil.copytree(result.folder / "adapter", tmp_path / "alone")
        shutil.copytree(base, tmp_path / "fresh")
        alone = leantune.load(tmp_path / "alone", base=str(tmp_path / "fresh"), device="cpu")
        assert torch.equal(logits(alone), logits(loaded))
    if method == "loreft":
        return
    lines = leantune.merge(result.folder, tmp_path / "merged")
    assert "largest difference" in lines[-1]
    merged = leantune.load(tmp_path / "merged", device="cpu")
    torch.testing.assert_close(logits(merged), logits(loaded), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_base_of_a_comparison_reads_the_same_tokens(method: str, data: Path, tmp_path: Path) -> None:
    """Prompts with new tokens asked the base for rows that it does not have."""
    base = tiny_model_folder(tmp_path / "base", tied=True)
    result = leantune.train(config(base, data, tmp_path / "run", method), quiet=True)
    assert result is not None
    comparison = leantune.compare(["<act>SELECT 1 name"], ["base", result.folder], SAMPLING)
    assert comparison is not None
    from leantune.checkpoint.trained import load_trained

    untouched: Any = load_trained(result.folder, device="cpu", untouched=True).model
    start = untouched.model.embed_tokens.weight
    mean = start[:ROWS].double().mean(0).float()
    torch.testing.assert_close(start[ROWS:], mean.expand(2, -1), rtol=1e-6, atol=1e-8)


def test_evaluation_reads_the_added_tokens(data: Path, tmp_path: Path) -> None:
    base = tiny_model_folder(tmp_path / "base")
    result = leantune.train(config(base, data, tmp_path / "run", "lora"), quiet=True)
    assert result is not None
    trained = leantune.evaluate(result.folder, str(data), ["loss"])
    leantune.merge(result.folder, tmp_path / "merged")
    model = leantune.load(tmp_path / "merged", device="cpu", template="chat")
    merged = leantune.evaluate(model, str(data), ["loss"])
    assert trained.facts is not None
    assert merged.facts is not None
    assert result.first_loss is not None
    assert trained.facts.supervised_tokens == merged.facts.supervised_tokens
    assert trained.values["loss"] == pytest.approx(merged.values["loss"], rel=1e-4)
    assert trained.values["loss"] < result.first_loss


def test_a_run_says_what_it_adds(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny_model_folder(tmp_path / "base", tied=True)
    leantune.train(config(base, data, tmp_path / "run", "lora"))
    output = capsys.readouterr().out
    assert f"2 tokens added: '<act>' ({ROWS}), '<obs>' ({ROWS + 1})" in output
    assert f"embeddings and output head (tied) have {ROWS + 2} rows, 2 more than the checkpoint" in output
    assert "the output head lm_head is tied to it and stays so" in output


def test_tokens_that_the_tokenizer_has_stop_the_run_before_it_is_made(data: Path, tmp_path: Path) -> None:
    base = tiny_model_folder(tmp_path / "base")
    wrong = config(base, data, tmp_path / "run", "lora")
    wrong["model"]["add_tokens"] = ["<pad>"]
    with pytest.raises(ModelError, match=r"model\.add_tokens: '<pad>'"):
        leantune.train(wrong, quiet=True)
    assert not (tmp_path / "run").exists()
