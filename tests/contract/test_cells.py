"""Every method on every base, for every architecture: built as training builds it, trained, saved, used.

Methods and bases come from the table of the grid: a new one is tested without a change here.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from leantune.bases import load_base
from leantune.checkpoint.adapter import BaseOfModel, load_adapter, save_trained
from leantune.errors import ModelError
from leantune.generate.decode import Sampling, generate
from leantune.methods import Attached
from leantune.models.packed import PackedLinear
from leantune.models.source import resolve_model
from leantune.train.build import BuiltModel
from tests.batches import gradients, logits_of, shake, small_batch
from tests.grid import CELLS, LIKE_LOREFT, built
from tests.models import ARCHITECTURES

BATCH = small_batch()
PROMPTS = ["SELECT name FROM employees", "the"]
# Fresh, these are the base itself. DoRA on a packed base is not: its magnitudes are those of the weights
# before they were packed.
IDENTITIES = {"full", "lora", "llama_pro"}
# What these do with a model, loreft and lora do too: a few architectures tell as much as all.
MADE_OF_OTHERS = {*LIKE_LOREFT, "together"}
FEW = {"llama", "gpt2", "mixtral"}


@dataclass(frozen=True)
class Cell:
    """A trained method on a base, and the logits of the base, of the fresh and of the trained method."""

    method: str
    base: str
    plain: PreTrainedModel
    model: BuiltModel
    untouched: Tensor
    fresh: Tensor
    trained: Tensor

    @property
    def attached(self) -> Attached:
        return self.model.attached


@pytest.fixture(scope="module")
def plain(wide_folder: Callable[[str], Path]) -> Callable[[str, str], tuple[PreTrainedModel, Tensor]]:
    """A base without a method and its logits, by architecture and base."""

    @cache
    def load(architecture: str, base: str) -> tuple[PreTrainedModel, Tensor]:
        model = load_base(base, resolve_model(str(wide_folder(architecture))))
        return model, logits_of(Attached("base", model), BATCH)

    return load


@pytest.fixture(
    scope="module",
    params=[
        (architecture, *cell)
        for architecture, cell in itertools.product(ARCHITECTURES, CELLS)
        if architecture in FEW or cell[0] not in MADE_OF_OTHERS
    ],
    ids="-".join,
)
def cell(
    request: pytest.FixtureRequest,
    wide_folder: Callable[[str], Path],
    plain: Callable[[str, str], tuple[PreTrainedModel, Tensor]],
) -> Cell:
    architecture, method, base = request.param
    model = built(wide_folder(architecture), method, base)
    fresh = logits_of(model.attached, BATCH)
    shake(model.attached)
    network, untouched = plain(architecture, base)
    return Cell(method, base, network, model, untouched, fresh, logits_of(model.attached, BATCH))


def test_fresh_identities_give_the_logits_of_their_base_to_the_bit(cell: Cell) -> None:
    """A method that is no identity at first, or a base that is stored otherwise once a method is there."""
    identity = cell.method in IDENTITIES or (cell.method, cell.base) == ("dora", "dense")
    assert torch.equal(cell.fresh, cell.untouched) == identity
    assert bool(torch.isfinite(cell.fresh).all())
    assert not torch.allclose(cell.trained, cell.untouched, atol=1e-3), "what is trained has no effect"


def test_the_base_is_stored_as_it_says(cell: Cell) -> None:
    """A base that leaves everything dense would pass all other tests."""
    packed = [type(m).__name__ for m in cell.attached.model.modules() if isinstance(m, PackedLinear)]
    if cell.base == "dense":
        assert packed == []
    else:
        assert set(packed) == {{"nf4": "Nf4Linear", "hqq": "HqqLinear"}[cell.base]}
        assert len(packed) >= 8
        assert any(
            f"base {cell.base}: {len(packed)} linear layers packed" in line for line in cell.model.lines
        )


def test_disabled_is_the_base(cell: Cell) -> None:
    """What a method leaves behind while it is switched off spoils every comparison with the base."""
    if cell.method == "full":
        with pytest.raises(ModelError, match="changed the weights themselves"):
            cell.attached.disabled()
        return
    with cell.attached.disabled():
        assert torch.equal(logits_of(cell.attached, BATCH), cell.untouched)
    assert torch.equal(logits_of(cell.attached, BATCH), cell.trained)


def test_gradients_reach_all_that_is_owned_and_nothing_else(cell: Cell) -> None:
    """A frozen weight that moves, or a trained one that never does."""
    found = gradients(cell.attached, BATCH)
    owned = cell.attached.trainable()
    assert owned
    assert {name for name, gradient in found.items() if gradient is not None} == set(owned)
    assert {parameter.dtype for parameter in owned.values()} == {torch.float32}
    for name in owned:
        gradient = found[name]
        assert gradient is not None
        assert bool(torch.isfinite(gradient).all()), name
        # The router of one expert of one has no choice to learn; whole blocks may have such weights.
        assert cell.method in ("full", "llama_pro") or bool((gradient != 0).any()), name


def test_what_is_saved_is_what_was_trained(cell: Cell, tokenizer: Any, tmp_path: Path) -> None:
    """Loaded again on a fresh base it must give the same logits and the same answers."""
    base = BaseOfModel(cell.model.base.skeleton, cell.model.base.original)
    folder = tmp_path / "saved"
    line = save_trained(cell.attached, folder, tokenizer, "base", None, base=base)
    assert "equal to memory bit for bit" in line
    if not cell.attached.adapter_files():
        fresh = Attached("base", load_base(cell.base, resolve_model(str(folder))))
    else:
        fresh = load_adapter(copy.deepcopy(cell.plain), folder)
        assert (fresh.name, fresh.describe()) == (cell.attached.name, cell.attached.describe())
        assert set(fresh.trainable()) == set(cell.attached.trainable())
    assert torch.equal(logits_of(fresh, BATCH), cell.trained)
    assert answers(fresh, tokenizer) == answers(cell.attached, tokenizer)


def answers(attached: Attached, tokenizer: Any) -> list[str]:
    attached.model.eval()
    model: Any = attached.model
    found = generate(model, tokenizer, PROMPTS, Sampling(max_new_tokens=2), attached=attached, batch_size=2)
    assert len(found) == len(PROMPTS)
    return found
