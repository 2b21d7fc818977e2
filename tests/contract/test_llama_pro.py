"""Llama-Pro on every architecture: identity at first, only new blocks trained, an ordinary model at last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from leantune import api
from leantune.checkpoint.adapter import save_trained
from leantune.checkpoint.expand import expand_model
from leantune.cli.main import main
from leantune.errors import CheckpointError, ModelError
from leantune.methods.llama_pro import attach
from leantune.methods.protocol import Attached
from leantune.models.anatomy import decoder_blocks
from leantune.models.source import resolve_model
from tests.batches import gradients, logits_of, shake, small_batch
from tests.expanded import tiny_expanded
from tests.fixtures import tiny_tokenizer
from tests.models import ARCHITECTURES, save_tiny, tiny_model

EVERYWHERE = pytest.mark.parametrize("architecture", list(ARCHITECTURES))
BATCH = small_batch()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(vocab_size=300)


def attached_to(architecture: str) -> tuple[PreTrainedModel, Attached]:
    plain, wide, _ = tiny_expanded(architecture, 2)
    return plain, attach(wide, seed=0, blocks=2)


def logits(model: Any) -> Tensor:
    return logits_of(Attached("base", model), BATCH)


def loaded(folder: Path, **options: Any) -> Any:
    loader: Any = AutoModelForCausalLM
    model, report = loader.from_pretrained(folder, output_loading_info=True, **options)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


@EVERYWHERE
def test_the_new_blocks_and_nothing_else_are_trained(architecture: str) -> None:
    """And nothing in them is dead: every zeroed parameter has a gradient that can move it."""
    plain, attached = attached_to(architecture)
    assert torch.equal(logits_of(attached, BATCH), logits(plain))
    blocks = list(decoder_blocks(attached.model))
    inside = tuple(f"{blocks[index]}." for index in (1, 4))
    owned = attached.trainable()
    assert set(owned) == {n for n, _ in attached.model.named_parameters() if n.startswith(inside)}
    assert attached.describe() == ["Llama-Pro: 2 new blocks of 5 are trained: 1, 4"]
    found = gradients(attached, BATCH)
    assert {name for name, gradient in found.items() if gradient is not None} == set(owned)
    for name, parameter in owned.items():
        gradient = found[name]
        assert gradient is not None
        if not bool(parameter.any()) and parameter.ndim > 1:
            assert bool((gradient != 0).any()), name


@EVERYWHERE
def test_disabled_is_the_base_model(architecture: str) -> None:
    plain, attached = attached_to(architecture)
    shake(attached)
    trained = logits_of(attached, BATCH)
    with attached.disabled():
        assert torch.equal(logits_of(attached, BATCH), logits(plain))
    assert torch.equal(logits_of(attached, BATCH), trained)
    assert not torch.allclose(trained, logits(plain), atol=1e-3)


@EVERYWHERE
def test_what_is_saved_is_an_ordinary_model(architecture: str, tokenizer: Any, tmp_path: Path) -> None:
    _, attached = attached_to(architecture)
    shake(attached)
    assert attached.export() is None
    save_trained(attached, tmp_path / "saved", tokenizer, "base", None)
    again = loaded(tmp_path / "saved")
    assert torch.equal(logits(again), logits_of(attached, BATCH))
    assert json.loads((tmp_path / "saved/config.json").read_text())["leantune_new_blocks"] == [1, 4]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_frozen_blocks_in_bf16_keep_new_blocks_in_fp32(architecture: str) -> None:
    plain, wide, _ = tiny_expanded(architecture, 2)
    model: Any = wide
    attached = attach(model.to(torch.bfloat16), seed=0, blocks=2)
    base: Any = plain
    assert torch.equal(logits_of(attached, BATCH), logits(base.to(torch.bfloat16)))
    shake(attached)
    assert {p.dtype for p in attached.trainable().values()} == {torch.float32}
    assert logits_of(attached, BATCH).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(attached, BATCH)
    assert {n for n, g in found.items() if g is not None} == set(attached.trainable())


def test_a_block_may_return_a_tuple() -> None:
    plain, attached = attached_to("llama")
    shake(attached)
    plain_logits, blocks = logits(plain), list(decoder_blocks(attached.model).values())
    block: Any = blocks[1]
    original = block.forward
    block.forward = lambda *args, **kwargs: (original(*args, **kwargs), "rest")
    seen: list[Any] = []

    def unwrap(_block: Any, _args: Any, output: Any) -> Any:
        seen.append(output[1])
        return output[0]

    block.register_forward_hook(unwrap)
    with attached.disabled():
        assert torch.equal(logits_of(attached, BATCH), plain_logits)
    assert seen == ["rest"]


def test_a_model_without_new_blocks_or_with_others_is_refused() -> None:
    with pytest.raises(ModelError, match="has no new blocks"):
        attach(tiny_model("llama"), seed=0, blocks=2)
    _, wide, _ = tiny_expanded("llama", 2)
    with pytest.raises(ModelError, match=r"method\.blocks: 3, but this model was expanded by 2"):
        attach(wide, seed=0, blocks=3)


@EVERYWHERE
def test_expanding_on_disk_changes_no_logit(architecture: str, tokenizer: Any, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", tokenizer, architecture)
    lines = api.expand(source, tmp_path / "wide", blocks=2)
    assert "3 blocks, expanded to 5; the new ones are 1, 4" in lines[0]
    assert "its logits equal those of the source bit for bit" in lines[-1]
    wide = loaded(tmp_path / "wide")
    assert len(decoder_blocks(wide)) == 5
    assert torch.equal(logits(wide), logits(loaded(source)))
    assert attach(wide, seed=0, blocks=2).trainable()


def test_the_command_writes_a_complete_folder(tokenizer: Any, tmp_path: Path, capsys: Any) -> None:
    source = save_tiny(tmp_path / "source", tokenizer, "llama", tie_word_embeddings=True)
    target = tmp_path / "deep" / "wide"
    assert main(["expand", str(source), "--blocks", "1", "--out", str(target)]) == 0
    assert "saved" in capsys.readouterr().out
    keys, old_keys = (set(load_file(folder / "model.safetensors")) for folder in (target, source))
    assert {key for key in keys if ".layers." not in key} == {
        key for key in old_keys if ".layers." not in key
    }
    assert "lm_head.weight" not in keys, "the tied head was written twice"
    assert AutoTokenizer.from_pretrained(target).get_vocab() == tokenizer.get_vocab()
    generation = [json.loads((f / "generation_config.json").read_text()) for f in (target, source)]
    assert generation[0] == generation[1]
    assert [path.name for path in target.parent.iterdir()] == ["wide"]


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "mixtral"])
def test_sharded_files_in_half_precision(architecture: str, tokenizer: Any, tmp_path: Path) -> None:
    """Tied embeddings, experts that lie one by one in the files, and an index; dtypes stay."""
    model: Any = tiny_model(architecture, vocab_size=max(320, len(tokenizer)))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "source", max_shard_size="40KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    limit = 40_000
    expand_model(resolve_model(str(tmp_path / "source")), 2, tmp_path / "wide", limit)
    files = list((tmp_path / "wide").glob("*.safetensors"))
    assert len(files) > 2
    for path in files:
        tensors = load_file(path)
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= limit
    wide = loaded(tmp_path / "wide")
    assert wide.dtype == torch.bfloat16
    assert torch.equal(logits(wide), logits(loaded(tmp_path / "source")))


def test_files_without_the_prefix_of_the_base_model(tokenizer: Any, tmp_path: Path) -> None:
    """The files of GPT-2 on the hub say `h.0.attn`, and hold masks that the model makes itself."""
    source = save_tiny(tmp_path / "source", tokenizer, "gpt2")
    expected = logits(loaded(source))
    path = source / "model.safetensors"
    tensors = {key.removeprefix("transformer."): value for key, value in load_file(path).items()}
    tensors["h.3.attn.leftover"] = torch.ones(3)  # the index of a layer that exists only in the new model
    save_file(tensors, path, metadata={"format": "pt"})
    api.expand(source, tmp_path / "wide", blocks=3)
    keys = set(load_file(tmp_path / "wide" / "model.safetensors"))
    assert {"h.5.attn.c_attn.weight", "wte.weight"} <= keys
    assert not any("leftover" in key for key in keys)
    assert torch.equal(logits(loaded(tmp_path / "wide")), expected)


def test_an_expanded_model_can_be_expanded_again(tokenizer: Any, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", tokenizer)
    api.expand(source, tmp_path / "once", blocks=1)
    api.expand(tmp_path / "once", tmp_path / "twice", blocks=4)
    twice = loaded(tmp_path / "twice")
    assert twice.config.leantune_new_blocks == [1, 3, 5, 7]
    assert torch.equal(logits(twice), logits(loaded(source)))


def refused(source: Path, target: Path, blocks: int = 1) -> str:
    with pytest.raises((ModelError, CheckpointError)) as caught:
        api.expand(source, target, blocks=blocks)
    assert not target.exists() or (target / "precious.txt").exists()
    assert not list(target.parent.glob(".tmp-*"))
    return str(caught.value)


def test_what_cannot_be_expanded_is_refused_and_leaves_nothing(tokenizer: Any, tmp_path: Path) -> None:
    source, target = save_tiny(tmp_path / "source", tokenizer), tmp_path / "wide"
    assert "expected 1 to 3" in refused(source, target, 4)
    config = source / "config.json"
    plain = config.read_text()
    config.write_text(json.dumps({**json.loads(plain), "quantization_config": {"quant_method": "gptq"}}))
    assert "unquantised model" in refused(source, target)
    config.write_text(plain)
    weights = source / "model.safetensors"
    tensors = load_file(weights)
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, weights, {"format": "pt"})
    assert "lacks 1 weights of LlamaForCausalLM: model.norm.weight" in refused(source, target)
    weights.rename(source / "pytorch_model.bin")
    message = refused(source, target)
    assert ".bin" in message
    assert "save_pretrained" in message
    target.mkdir()
    (target / "precious.txt").write_text("mine")
    assert "exists already" in refused(source, target)


def test_a_model_that_depends_on_the_index_of_a_layer_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", tokenizer, "gpt2", scale_attn_by_inverse_layer_idx=True)
    assert "decides by a layer's index" in refused(source, tmp_path / "wide")


def test_a_wrong_claim_about_writers_is_caught_before_the_folder_exists(
    tokenizer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("leantune.models.expand.residual_writers", lambda *_: ["mlp.down_proj.weight"])
    source = save_tiny(tmp_path / "source", tokenizer)
    assert "is not an identity" in refused(source, tmp_path / "wide")
