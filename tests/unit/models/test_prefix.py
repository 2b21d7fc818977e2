"""The leading blocks of any decoder: their output is taken and given back, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leantune.methods import Attached
from leantune.models.anatomy import decoder_blocks
from leantune.models.head import labelled_logits
from leantune.models.prefix import FrozenPrefix, random_parts
from leantune.ops.loss import summed_cross_entropy
from tests.batches import shake, small_batch
from tests.methods import attached_to
from tests.models import ARCHITECTURES, OTHER_BLOCKS, tiny_model

BATCH = small_batch()
UPPER: dict[str, dict[str, Any]] = {
    "lora": {"rank": 2, "layers": [2]},
    "dora": {"rank": 2, "layers": [2]},
    # It edits after the last block of the prefix.
    "loreft": {"rank": 2, "layers": [1, 2], "position": "f2+l2"},
}


def passed(attached: Attached) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of one pass, without dropout."""
    model = attached.model.eval()
    model.zero_grad(set_to_none=True)
    with attached.edits(BATCH.prompt_lengths):
        logits = labelled_logits(model, BATCH.input_ids, BATCH.label_index)
        summed_cross_entropy(logits.clone(), BATCH.labels).backward()
    return logits.detach(), {n: p.grad for n, p in attached.trainable().items() if p.grad is not None}


def computed(model: nn.Module) -> list[int]:
    """Which blocks compute from now on, by index: those whose inner modules run."""
    seen: list[int] = []
    for index, block in enumerate(decoder_blocks(model).values()):
        first = next(
            m for m in block.modules() if isinstance(m, nn.Linear | nn.LayerNorm) or not [*m.children()]
        )
        first.register_forward_hook(lambda *_, index=index: seen.append(index))
    return seen


# Blocks of these return attention weights beside the hidden states.
TALKATIVE = ["bloom"]


@pytest.mark.parametrize("architecture", [a for a in (*ARCHITECTURES, *OTHER_BLOCKS) if a not in TALKATIVE])
@pytest.mark.parametrize("method", UPPER)
def test_a_replayed_pass_is_equal_to_the_bit(method: str, architecture: str) -> None:
    """States went on in another form or type, or edits after the last block of the prefix were skipped."""
    attached = attached_to(method, architecture, **UPPER[method])
    shake(attached, 0.3)
    prefix = FrozenPrefix(attached.model, attached.frozen_blocks())
    assert prefix.num_blocks == 2
    plain, gradients = passed(attached)
    with prefix.capturing() as captured:
        assert torch.equal(passed(attached)[0], plain)
    assert prefix.obstacle is None
    seen = computed(attached.model)
    with prefix.replaying(captured[0]):
        replayed, again = passed(attached)
    assert set(seen) == {2}
    assert torch.equal(replayed, plain)
    assert gradients.keys() == again.keys()
    assert all(torch.equal(again[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("architecture", TALKATIVE)
def test_blocks_that_return_more_than_states_are_found(architecture: str) -> None:
    """What they return besides would have been lost."""
    attached = attached_to("lora", architecture, **UPPER["lora"])
    prefix = FrozenPrefix(attached.model, 2)
    with prefix.capturing():
        passed(attached)
    assert prefix.obstacle == "decoder blocks return more than hidden states"


def test_what_is_kept_does_not_change_with_the_states_it_was_taken_from() -> None:
    """A hook that edits in place changed the kept states, in the first pass or in a later one."""
    model = tiny_model()
    prefix = FrozenPrefix(model, 1)
    with prefix.capturing() as captured:
        model(BATCH.input_ids)
    expected = captured[0].clone()
    next(iter(decoder_blocks(model).values())).register_forward_hook(lambda _b, _a, out: out.add_(1.0))
    with prefix.capturing() as again:
        model(BATCH.input_ids)
    with prefix.replaying(captured[0]):
        model(BATCH.input_ids)
    assert torch.equal(again[0], expected)
    assert torch.equal(captured[0], expected)


class Sharing(nn.Module):
    """A decoder layer that may look into what earlier ones left for it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor, shared_states: dict[int, Tensor], **options: Any) -> Tensor:
        """The inner layer's output."""
        shared_states[len(shared_states)] = hidden_states
        return self.inner(hidden_states, **options)


def test_blocks_that_leave_something_for_later_ones_are_found() -> None:
    """Models whose later layers use the keys of earlier ones would go on from those of another batch."""
    model: Any = tiny_model()
    shared: dict[int, Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = Sharing(layer)
        model.model.layers[index].register_forward_pre_hook(
            lambda _m, args, options: (args, {**options, "shared_states": shared}), with_kwargs=True
        )
    prefix = FrozenPrefix(model, 1)
    with prefix.capturing():
        model(BATCH.input_ids, use_cache=False)
    assert len(shared) == 3
    assert prefix.obstacle == "decoder blocks hand on shared_states to later ones"


def test_a_prefix_that_drops_at_random_is_told() -> None:
    """Its first epoch would have been repeated for ever, with the same units dropped."""
    assert random_parts(tiny_model(), 2) == []
    assert random_parts(tiny_model(attention_dropout=0.1), 2) == ["config attention_dropout=0.1"]
    assert "transformer.drop" in random_parts(tiny_model("gpt2"), 1)
    quiet = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    assert random_parts(tiny_model("gpt2", **quiet), 1) == []
    assert random_parts(tiny_model("gpt_neox", classifier_dropout=0.1), 1) == []


def test_dropout_of_what_is_trained_above_is_no_obstacle() -> None:
    attached = attached_to("lora", rank=2, layers=[2], dropout=0.5)
    assert random_parts(attached.model, attached.frozen_blocks()) == []
