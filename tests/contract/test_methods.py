"""What every method must do on every architecture: train what it owns, and save what it trained.

Methods are found by the registry: a new file in `leantune/methods` is tested without a change here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leantune.bases import load_base
from leantune.checkpoint.adapter import load_adapter, save_trained
from leantune.errors import ModelError
from leantune.methods import Attached, attach, method_names
from leantune.models.anatomy import LINEAR_TYPES, decoder_blocks
from leantune.models.source import resolve_model
from tests.batches import gradients, logits_of, shake, small_batch
from tests.fixtures import tiny_tokenizer
from tests.models import ARCHITECTURES, tiny_model

METHODS = method_names()
IDENTITY_AT_START = {"dora", "full", "lora"}
EVERYWHERE = pytest.mark.parametrize("architecture", list(ARCHITECTURES))
EVERY_METHOD = pytest.mark.parametrize("method", METHODS)
BATCH = small_batch()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(vocab_size=300)


def attached_to(architecture: str, method: str, **settings: Any) -> Attached:
    return attach(method, tiny_model(architecture), settings, seed=0)


def base_logits(architecture: str) -> Tensor:
    return logits_of(Attached("base", tiny_model(architecture)), BATCH)


def test_the_registry_finds_the_methods() -> None:
    assert {"full", "lora", "loreft"} <= set(METHODS)
    assert not {"protocol", "registry", "__init__"} & set(METHODS)


@EVERYWHERE
@EVERY_METHOD
def test_a_fresh_identity_method_gives_the_base_models_logits(architecture: str, method: str) -> None:
    """A method that starts away from the base model says so by standing outside the set above."""
    difference = logits_of(attached_to(architecture, method), BATCH) - base_logits(architecture)
    assert bool((difference == 0).all()) == (method in IDENTITY_AT_START)


@EVERYWHERE
@EVERY_METHOD
def test_disabled_is_the_untouched_model(architecture: str, method: str) -> None:
    attached = attached_to(architecture, method)
    shake(attached)
    if attached.export() is None:
        with pytest.raises(ModelError, match="changed the weights themselves"):
            attached.disabled()
        return
    trained = logits_of(attached, BATCH)
    with attached.disabled():
        assert torch.equal(logits_of(attached, BATCH), base_logits(architecture))
    assert torch.equal(logits_of(attached, BATCH), trained)
    assert not torch.allclose(trained, base_logits(architecture), atol=1e-3)


@EVERYWHERE
@EVERY_METHOD
def test_gradients_reach_all_that_is_owned_and_nothing_else(architecture: str, method: str) -> None:
    attached = attached_to(architecture, method)
    shake(attached)
    found = gradients(attached, BATCH)
    owned = attached.trainable()
    assert owned
    assert {name for name, gradient in found.items() if gradient is not None} == set(owned)
    assert all(parameter.dtype == torch.float32 for parameter in owned.values())
    for name in owned:
        gradient = found[name]
        assert gradient is not None
        assert bool(torch.isfinite(gradient).all())
        # The router of one expert of one has no choice to learn; whole models may have such weights.
        assert method == "full" or bool((gradient != 0).any()), name


@EVERYWHERE
@EVERY_METHOD
def test_activation_checkpointing_changes_no_gradient(architecture: str, method: str) -> None:
    """Case 16: with frozen embeddings the checkpointed blocks had no input that needs a gradient,
    and edits made by hooks were gone when the blocks were computed again."""
    attached = attached_to(architecture, method)
    shake(attached)
    plain = gradients(attached, BATCH)
    model: Any = attached.model
    assert model.supports_gradient_checkpointing
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
        {"use_reentrant": False}
    )
    calls: list[int] = []
    last_block = list(decoder_blocks(model).values())[-1]
    inner = next(m for m in last_block.modules() if isinstance(m, LINEAR_TYPES))
    inner.register_forward_pre_hook(lambda *_: calls.append(1))
    again = gradients(attached, BATCH)
    assert len(calls) == 2, "the last block was not computed again"
    assert {n for n, g in again.items() if g is not None} == set(attached.trainable())
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-6)


@EVERYWHERE
@EVERY_METHOD
def test_what_is_saved_is_what_was_trained(
    architecture: str, method: str, tokenizer: Any, tmp_path: Path
) -> None:
    attached = attached_to(architecture, method)
    shake(attached)
    expected = logits_of(attached, BATCH)
    line = save_trained(attached, tmp_path / "saved", tokenizer, "base", None)
    assert "equal to memory bit for bit" in line
    if attached.export() is None:
        fresh = Attached("base", _model_in(tmp_path / "saved"))
    else:
        fresh = load_adapter(tiny_model(architecture), tmp_path / "saved")
        assert (fresh.name, fresh.describe()) == (attached.name, attached.describe())
        assert set(fresh.trainable()) == set(attached.trainable())
    assert torch.equal(logits_of(fresh, BATCH), expected)


def _model_in(folder: Path) -> nn.Module:
    return load_base("dense", resolve_model(str(folder)))


@EVERY_METHOD
def test_new_parameters_depend_on_the_seed_and_on_nothing_else(method: str) -> None:
    """Case 14: ranks that had drawn other random numbers before started from other adapters."""
    first = attach(method, tiny_model("llama"), {}, seed=0).trainable()
    torch.rand(17)
    second = attach(method, tiny_model("llama"), {}, seed=0).trainable()
    other = attach(method, tiny_model("llama"), {}, seed=1).trainable()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    if method != "full":
        assert any(not torch.equal(first[name], other[name]) for name in first)


@EVERY_METHOD
def test_layers_of_one_model_start_differently(method: str) -> None:
    parameters = attach(method, tiny_model("llama"), {}, seed=0).trainable()
    matrices = [p for p in parameters.values() if p.ndim == 2 and bool((p != 0).any())]
    for i, one in enumerate(matrices):
        assert all(one.shape != other.shape or not torch.equal(one, other) for other in matrices[i + 1 :])


@EVERY_METHOD
def test_decay_spares_vectors(method: str) -> None:
    attached = attach(method, tiny_model("gpt2"), {}, seed=0)
    spared, trainable = attached.decay_free(), attached.trainable()
    assert spared <= set(trainable)
    assert {name for name, p in trainable.items() if p.ndim < 2} <= spared


@EVERY_METHOD
def test_frozen_weights_in_bf16_keep_trained_weights_in_fp32(method: str) -> None:
    """Precision bf16_mixed on training, and generation in bf16 without autocast."""
    model: Any = tiny_model("llama")
    model.to(torch.bfloat16)
    attached = attach(method, model, {}, seed=0)
    shake(attached)
    assert {p.dtype for p in attached.trainable().values()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(attached, BATCH)
    assert {n for n, g in found.items() if g is not None} == set(attached.trainable())
    if method != "full":
        assert logits_of(attached, BATCH).dtype == torch.bfloat16
