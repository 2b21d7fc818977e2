"""What saves memory changes no result: recomputed blocks and logits in chunks, on every method everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from leantune.methods import Attached, method_names
from leantune.models.anatomy import LINEAR_TYPES, decoder_blocks, input_embeddings, output_head
from leantune.models.precision import PRECISIONS
from leantune.models.recompute import recompute_blocks
from leantune.train.forward import summed_loss
from tests.batches import gradients, lively, shake, small_batch
from tests.grid import built
from tests.methods import attached_to, model_for
from tests.models import ARCHITECTURES

EVERYWHERE = pytest.mark.parametrize("architecture", list(ARCHITECTURES))
EVERY_METHOD = pytest.mark.parametrize("method", method_names())
BATCH = small_batch()
FP32 = PRECISIONS["fp32"]
# What these do to their logits must matter: caps far below the logits, two experts to choose between.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 0.5},
    "gemma3_text": {"final_logit_softcapping": 0.5},
    "mixtral": {"num_experts_per_tok": 2},
}


def shaken(architecture: str, method: str, **changes: Any) -> Attached:
    changes = {**CHANGES.get(architecture, {}), **changes}
    attached = attached_to(method, model=lively(model_for(method, architecture, **changes), 3.0))
    shake(attached)
    return attached


def backward(attached: Attached, chunk: int | None) -> tuple[float, dict[str, Tensor]]:
    """The loss of the batch and the gradients of all that is trained."""
    model: Any = attached.model
    model.train().zero_grad(set_to_none=True)
    torch.manual_seed(BATCH.seed)
    with attached.edits(BATCH.prompt_lengths):
        loss = summed_loss(model, BATCH, FP32, chunk)
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


@EVERYWHERE
@EVERY_METHOD
def test_recomputing_blocks_changes_no_gradient(architecture: str, method: str) -> None:
    """Case 16: with frozen embeddings the checkpointed blocks had no input that needs a gradient,
    and edits made by hooks were gone when the blocks were computed again."""
    attached = shaken(architecture, method)
    plain = gradients(attached, BATCH)
    recompute_blocks(attached.model)
    calls: list[int] = []
    last_block = list(decoder_blocks(attached.model).values())[-1]
    inner = next(m for m in last_block.modules() if isinstance(m, LINEAR_TYPES))
    inner.register_forward_pre_hook(lambda *_: calls.append(1))
    again = gradients(attached, BATCH)
    assert len(calls) == 2, "the last block was not computed again"
    assert {n for n, g in again.items() if g is not None} == set(attached.trainable())
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-6)


@EVERYWHERE
@EVERY_METHOD
def test_logits_in_chunks_change_neither_loss_nor_gradients(architecture: str, method: str) -> None:
    """Scaled or capped logits, experts, and gradients that reach a tied table by two ways: as the embeddings
    and, chunk by chunk, as the head."""
    attached = shaken(architecture, method, tie_word_embeddings=True)
    assert output_head(attached.model).weight is input_embeddings(attached.model).weight
    loss, expected = backward(attached, None)
    for chunk in (4, 1):
        chunked, found = backward(attached, chunk)
        assert chunked == pytest.approx(loss, rel=1e-6)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * max(scale, 1.0))


@pytest.mark.parametrize("base", ["dense", "nf4", "hqq"])
@pytest.mark.parametrize("method", ["lora", "loreft", "llama_pro"])
def test_all_levers_at_once_on_every_base(method: str, base: str, wide_folder: Callable[[str], Path]) -> None:
    """As a run sets them, on packed layers too."""
    levers = {"activation_checkpointing": True, "checkpoint_every_blocks": 2, "activation_offload": True}
    expected: tuple[float, dict[str, Tensor]] | None = None
    for options in ({}, levers):
        attached = built(wide_folder("llama"), method, base, **options).attached
        shake(attached)
        found = backward(attached, 4 if options else None)
        if expected is not None:
            assert found[0] == pytest.approx(expected[0], rel=1e-6)
            for name, gradient in expected[1].items():
                torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5)
            assert found[1].keys() == expected[1].keys() == attached.trainable().keys()
        expected = found


def states_of(blocks: list[Any], calls: list[str]) -> list[StorageWeakRef]:
    """Grows by what every module inside these blocks returns; `calls` by a name for each of their passes."""
    kept: list[StorageWeakRef] = []

    def note(name: str, output: Any) -> None:
        calls.append(name)
        tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if torch.is_tensor(t)]
        kept.extend(StorageWeakRef(t.untyped_storage()) for t in tensors)

    for block in blocks:
        for name, module in block.named_modules():
            if not name.startswith("reft"):
                module.register_forward_hook(lambda _m, _a, output, name=name: note(name, output))
    return kept


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("loreft", {"layers": "3", "rank": 2}),
        ("loreft", {"layers": "4", "rank": 2, "component": "block_input"}),
        ("lora", {"layers": "4-5", "rank": 2}),
    ],
)
def test_blocks_below_all_that_is_trained_keep_nothing_and_are_not_computed_again(
    method: str, settings: dict[str, Any], checkpointing: bool
) -> None:
    """Four of six blocks here. A lever for all blocks kept the inputs of these, or ran them twice."""
    attached = attached_to(method, model=model_for(method, num_hidden_layers=6), **settings)
    model: Any = attached.model
    assert attached.frozen_blocks() == 4
    blocks = list(decoder_blocks(model).values())
    if checkpointing:
        recompute_blocks(model)
    below: list[str] = []
    above: list[str] = []
    kept_below, kept_above = states_of(blocks[:4], below), states_of(blocks[4:], above)
    model.train()
    with attached.edits(BATCH.prompt_lengths):
        loss = summed_loss(model, BATCH, FP32)
    alive = [reference for reference in kept_below if not reference.expired()]
    assert len(alive) <= 1, "more than the input of the first block above is kept"
    assert any(not reference.expired() for reference in kept_above), "nothing was watched"
    passes = len(below), len(above)
    loss.backward()
    assert len(below) == passes[0], "a block below was computed again"
    assert (len(above) > passes[1]) == checkpointing
