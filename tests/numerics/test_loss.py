"""The summed cross-entropy and the narrowed head, against the plain computations they replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from leantune.errors import ModelError
from leantune.models.head import labelled_logits
from leantune.ops.loss import summed_cross_entropy
from tests.batches import lively, small_batch
from tests.models import ARCHITECTURES, tiny_model

BATCH = small_batch()


def random_logits(
    rows: int, vocabulary: int, dtype: torch.dtype, scale: float = 5.0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = (scale * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    return logits, torch.randint(vocabulary, (rows,), generator=generator)


def loss_and_gradient(logits: Tensor, labels: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = summed_cross_entropy(leaf * 1.0, labels)
    (loss / divisor).backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_those_of_torch(dtype: torch.dtype, rows: int) -> None:
    """Rows are worked on in chunks of 64: both sides of a boundary are checked."""
    logits, labels = random_logits(rows, 97, dtype)
    loss, gradient = loss_and_gradient(logits, labels, 7.0)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="sum")
    (expected / 7.0).backward()
    assert wide.grad is not None
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3  # bf16 keeps 8 bits of values up to 1/7
    torch.testing.assert_close(gradient.double(), wide.grad, rtol=0, atol=tolerance)


def test_large_logits_do_not_overflow() -> None:
    logits, labels = random_logits(5, 11, torch.float32, scale=1e4)
    loss, gradient = loss_and_gradient(logits, labels, 1.0)
    expected = F.cross_entropy(logits.double(), labels, reduction="sum")
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert bool(torch.isfinite(gradient).all())


def test_without_gradients_the_logits_are_left_alone() -> None:
    logits, labels = random_logits(70, 11, torch.float32)
    before = logits.clone()
    loss = summed_cross_entropy(logits, labels)
    assert torch.equal(logits, before)
    assert float(loss) == pytest.approx(float(F.cross_entropy(logits, labels, reduction="sum")), rel=1e-6)
    leaf = logits.clone().requires_grad_()
    with torch.no_grad():
        summed_cross_entropy(leaf, labels)
    assert torch.equal(leaf, before)


def test_reading_logits_that_became_their_gradient_is_an_error_and_not_a_wrong_gradient() -> None:
    logits, labels = random_logits(5, 11, torch.float32)
    scores = logits.requires_grad_().exp()  # exp keeps its result for its own backward
    loss = summed_cross_entropy(scores, labels)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_loss_of_parts_adds_up_to_that_of_the_whole() -> None:
    """Case 2: sums, not means, so that any split of a window gives the same gradient."""
    logits, labels = random_logits(26, 31, torch.float32)
    _, whole = loss_and_gradient(logits, labels, 26.0)
    parts = [loss_and_gradient(logits[a:b], labels[a:b], 26.0)[1] for a, b in ((0, 1), (1, 6), (6, 26))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-6, atol=1e-7)


CHANGED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ARCHITECTURES),
    ("gemma2", {"final_logit_softcapping": 3.0}),
    ("granite", {"logits_scaling": 8.0}),
    ("cohere", {"logit_scale": 0.5}),
    ("llama", {"tie_word_embeddings": True}),
    ("gemma3_text", {"final_logit_softcapping": 2.0}),
]


@pytest.mark.parametrize(("architecture", "changes"), CHANGED)
def test_logits_at_labels_are_those_of_the_whole_model(architecture: str, changes: dict[str, Any]) -> None:
    """With its scaling and capping, and with an attention mask where we pass none."""
    model: Any = lively(tiny_model(architecture, **changes), 3.0)
    mask = (torch.arange(BATCH.input_ids.shape[1])[None] < torch.tensor([[10], [14], [7]])).long()
    with torch.no_grad():
        narrow = labelled_logits(model, BATCH.input_ids, BATCH.label_index)
        full = model(input_ids=BATCH.input_ids, attention_mask=mask, use_cache=False).logits
    assert narrow.shape == (len(BATCH.labels), 320)
    torch.testing.assert_close(narrow, full.flatten(0, 1)[BATCH.label_index], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "plain", "changed"),
    [
        ("gemma2", {"final_logit_softcapping": 1e4}, {"final_logit_softcapping": 3.0}),
        ("granite", {"logits_scaling": 1.0}, {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 1.0}, {"logit_scale": 0.5}),
    ],
)
def test_what_a_model_does_to_its_logits_is_done(
    architecture: str, plain: dict[str, Any], changed: dict[str, Any]
) -> None:
    """A head that is called by hand leaves scaling and soft-capping out."""
    one, other = (lively(tiny_model(architecture, **settings), 3.0) for settings in (plain, changed))
    with torch.no_grad():
        before = labelled_logits(one, BATCH.input_ids, BATCH.label_index)
        after = labelled_logits(other, BATCH.input_ids, BATCH.label_index)
    factor = {"granite": 1 / 8.0, "cohere": 0.5}.get(architecture)
    expected = 3.0 * torch.tanh(before / 3.0) if factor is None else factor * before
    assert float((before - after).abs().max()) > 1e-2
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("architecture", "changes"), CHANGED)
def test_the_gradient_through_the_narrowed_head_is_that_of_the_plain_loss(
    architecture: str, changes: dict[str, Any]
) -> None:
    model: Any = tiny_model(architecture, **changes).requires_grad_(True)
    loss = summed_cross_entropy(labelled_logits(model, BATCH.input_ids, BATCH.label_index), BATCH.labels)
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=BATCH.input_ids, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1)[BATCH.label_index], BATCH.labels, reduction="sum").backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-4)


def test_a_model_that_does_not_use_its_head_is_refused() -> None:
    model: Any = tiny_model("llama")
    model.get_output_embeddings = lambda: torch.nn.Linear(32, 320)
    with pytest.raises(ModelError, match="does not send its hidden states through get_output_embeddings"):
        labelled_logits(model, BATCH.input_ids, BATCH.label_index)


def test_the_head_is_whole_again_afterwards() -> None:
    model: Any = tiny_model("llama")
    labelled_logits(model, BATCH.input_ids, BATCH.label_index)
    assert model(input_ids=BATCH.input_ids).logits.shape == (3, 14, 320)
