"""Activation checkpointing: which blocks run twice, what they keep, and when they do not run twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from leantune.models import recompute
from leantune.models.anatomy import LINEAR_TYPES, decoder_blocks
from leantune.models.recompute import recompute_blocks
from tests.batches import gradients, shake, small_batch
from tests.methods import attached_to
from tests.models import tiny_model

BATCH = small_batch()


def counted(model: Any) -> list[int]:
    """How often the first linear layer of each block has run; counts on."""
    calls: list[int] = []

    def count(index: int) -> Callable[..., None]:
        calls.append(0)

        def add(*_: Any) -> None:
            calls[index] += 1

        return add

    for index, block in enumerate(decoder_blocks(model).values()):
        first = next(module for module in block.modules() if isinstance(module, LINEAR_TYPES))
        first.register_forward_pre_hook(count(index))
    return calls


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("every", "runs"), [(1, [2, 2, 2]), (2, [2, 1, 2]), (3, [2, 1, 1]), (9, [2, 1, 1])])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_every_kth_block_is_computed_again_and_gradients_stay(
    architecture: str, every: int, runs: list[int], offload: bool
) -> None:
    """To the bit, with GPT-2's dropout too; a k that recomputes other blocks costs other memory."""
    attached = attached_to("lora", architecture, rank=2, dropout=0.3)
    shake(attached)
    plain = gradients(attached, BATCH)
    recompute_blocks(attached.model, every, offload)
    calls = counted(attached.model)
    again = gradients(attached, BATCH)
    assert calls == runs
    owned = attached.trainable()
    assert {name for name, gradient in again.items() if gradient is not None} == set(owned)
    for name in owned:
        torch.testing.assert_close(again[name], plain[name], rtol=0, atol=0)


def kept_by_blocks(model: Any) -> list[int]:
    """Values that autograd is given to keep while each block runs forward; hooks within are not seen."""
    kept: list[int] = []
    inside = [False]

    def saved(tensor: Tensor) -> Tensor:
        if inside[0]:
            kept[-1] += tensor.numel()
        return tensor

    def enter(*_: Any) -> None:
        kept.append(0)
        inside[0] = True

    def leave(*_: Any) -> None:
        inside[0] = False

    for block in decoder_blocks(model).values():
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        model(BATCH.input_ids, use_cache=False)
    return kept


def test_a_recomputed_block_keeps_its_input_and_nothing_else() -> None:
    """That is what it is for. With offload even the input goes elsewhere."""
    hidden = BATCH.input_ids.numel() * 32
    assert min(kept_by_blocks(trained())) > 10 * hidden
    for every, offload, expected in ((1, False, hidden), (1, True, 0)):
        model = trained()
        recompute_blocks(model, every, offload)
        assert kept_by_blocks(model) == [expected] * 3
    model = trained()
    recompute_blocks(model, 2)
    first, second, third = kept_by_blocks(model)
    assert first == third == hidden
    assert second > 10 * hidden


def trained() -> Any:
    return tiny_model().requires_grad_(True)


def test_nothing_is_computed_again_where_no_gradient_is_wanted() -> None:
    """Evaluation and generation would pay for what they do not need, and lose their cache."""
    model = trained()
    recompute_blocks(model)
    calls = counted(model)
    model.eval()
    model(BATCH.input_ids).logits.sum().backward()
    assert calls == [1, 1, 1]
    model.train()
    with torch.no_grad():
        model(BATCH.input_ids)
    assert calls == [2, 2, 2]
    cached = model.eval().generate(BATCH.input_ids[:1, :6], max_new_tokens=3, do_sample=False)
    assert cached.shape[1] <= 9
    assert calls[0] <= 5


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("lora", {"rank": 2, "layers": [2]}),
        ("loreft", {"rank": 2, "layers": [1], "position": "f2+l2"}),
        ("loreft", {"rank": 2, "layers": [2], "position": "f2+l2", "component": "block_input"}),
    ],
)
def test_below_what_is_trained_nothing_is_kept_or_computed_again(
    method: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen blocks went through the checkpoint too, which copies the state of the generators each time."""
    attached = attached_to(method, **settings)
    shake(attached)
    recomputed: list[Any] = []

    def counting(forward: Any, *args: Any, **kwargs: Any) -> Any:
        recomputed.append(forward)
        return checkpoint(forward, *args, **kwargs)

    monkeypatch.setattr(recompute, "checkpoint", counting)
    recompute_blocks(attached.model)
    calls = counted(attached.model)
    gradients(attached, BATCH)
    frozen = settings["layers"][0]
    assert calls == [1] * attached.frozen_blocks() + [2] * (3 - attached.frozen_blocks())
    assert len(recomputed) == 3 - frozen
    with attached.edits(BATCH.prompt_lengths):
        kept = kept_by_blocks(attached.model)
    assert kept[:frozen] == [0] * frozen
    assert kept[2] == BATCH.input_ids.numel() * 32


def test_frozen_embeddings_do_not_stop_the_gradient() -> None:
    """Case 16: without a gradient on its input, a block that is checkpointed reentrantly gives none."""
    attached = attached_to("lora", rank=2, layers=[0])
    shake(attached)
    recompute_blocks(attached.model)
    found = gradients(attached, BATCH)
    assert all(bool((found[name] != 0).any()) for name in attached.trainable())  # pyright: ignore[reportOptionalOperand,reportAttributeAccessIssue,reportArgumentType]
