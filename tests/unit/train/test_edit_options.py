"""What records say about edits reaches the interventions in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from leantune.config.subspaces import Subspaces
from leantune.data.batches import MicroBatch, collate
from leantune.data.encode import EncodingRules, encode_examples
from leantune.data.formats import read_examples
from leantune.data.markers import Markers
from leantune.data.readers import Row
from leantune.data.records import EncodedRecords
from leantune.data.templates import make_template
from leantune.errors import DataError
from leantune.methods import Attached, attach
from leantune.models.precision import choose_precision
from leantune.train.assemble import check_positions
from leantune.train.forward import summed_loss
from tests.batches import shake
from tests.fixtures import tiny_llama, tiny_tokenizer

CPU = torch.device("cpu")
SUBSPACES = Subspaces.read(4, {"formal": "0-1", "sql": "2-3"})


def records_of(prompts: Sequence[str], subspaces: object = None) -> EncodedRecords:
    tokenizer = tiny_tokenizer()
    rows = [Row({"prompt": p, "completion": " yes", "subspaces": subspaces}, "a:1") for p in prompts]
    name, examples = read_examples(rows)
    rules = EncodingRules(100, markers=Markers("[[", "]]"), subspaces=SUBSPACES.mask)
    return encode_examples(examples, make_template("plain", name, tokenizer), rules, source="a")


def batch_of(prompts: Sequence[str], subspaces: object = None) -> MicroBatch:
    return collate(records_of(prompts, subspaces), range(len(prompts)), pad_id=4)


def attached_at(position: str) -> Attached:
    model = tiny_llama().requires_grad_(False)
    settings = {"rank": 4, "position": position, "layers": [1]}
    if position == "markers":
        settings["markers"] = ["[[", "]]"]
    attached = attach("loreft", model, settings, seed=0)
    shake(attached, 0.3)
    return attached


def loss_of(attached: Attached, batch: MicroBatch, **options: Any) -> Tensor:
    with attached.edits(batch.prompt_lengths, **{**batch.edit_options, **options}):
        return summed_loss(attached.model, batch, choose_precision("fp32", CPU))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("choice", "still"), [("formal", slice(2, 4)), (["sql"], slice(0, 2))])
def test_dimensions_that_a_record_does_not_choose_get_no_gradient(choice: object, still: slice) -> None:
    """Records of one style changed what another had learned."""
    attached = attached_at("f2+l2")
    loss_of(attached, batch_of(["the old man", "a woman said"], choice)).backward()
    gradients = {name: p.grad for name, p in attached.trainable().items() if p.grad is not None}
    weight = next(grad for name, grad in gradients.items() if name.endswith(".weight"))
    rotation = next(grad for name, grad in gradients.items() if name.endswith(".rotation"))
    acting = slice(0, 2) if still.start == 2 else slice(2, 4)
    assert not weight[still].any()
    assert not rotation[:, still].any()
    assert weight[acting].abs().min() > 0


def test_marked_tokens_alone_are_edited() -> None:
    """With right padding and records of different length, marks must stay with their tokens."""
    attached = attached_at("markers")
    prompts = ["the [[old man]] said to the woman", "no marks", "[[a]]"]
    with attached.disabled():
        untouched = loss_of(attached, batch_of(prompts))
    together = loss_of(attached, batch_of(prompts))
    alone = sum(loss_of(attached, batch_of([prompt])).item() for prompt in prompts)
    assert together.item() == pytest.approx(alone, rel=1e-5)
    assert abs(together.item() - untouched.item()) > 1e-3
    with attached.disabled():
        plain = loss_of(attached, batch_of(["no marks"]))
    assert loss_of(attached, batch_of(["no marks"])).item() == plain.item()


def test_records_without_any_marked_span_are_refused() -> None:
    """A run whose data.markers were misspelt trained nothing, to the end."""
    attached = attached_at("markers")
    with pytest.raises(DataError, match="no record has such a span in its prompt"):
        check_positions(attached, records_of(["the man", "((a))"]))
    check_positions(attached, records_of(["the man", "[[a]]"]))
