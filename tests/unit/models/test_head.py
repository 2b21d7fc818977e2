"""Logits in chunks: how many exist at a time, what is left behind. Results: tests/contract/test_levers."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leantune.errors import ModelError
from leantune.models.head import chunked_loss, labelled_logits
from leantune.models.precision import PRECISIONS
from leantune.ops.loss import summed_cross_entropy
from leantune.train.forward import summed_loss
from tests.batches import lively, small_batch
from tests.models import ARCHITECTURES, tiny_model

BATCH = small_batch()
NUM_LABELS = len(BATCH.labels)


class HeadWatch:
    """Rows that go through the output head, call by call, and how many rows of logits were alive at most."""

    def __init__(self, model: Any) -> None:
        self.rows: list[int] = []
        self.most = 0
        self._alive: list[weakref.ref[Tensor]] = []
        model.get_output_embeddings().register_forward_hook(self._saw)

    def _saw(self, _module: nn.Module, _args: Any, logits: Tensor) -> None:
        self.rows.append(logits.shape[:-1].numel())
        self._alive.append(weakref.ref(logits))
        kept = [tensor for ref in self._alive if (tensor := ref()) is not None]
        self.most = max(self.most, sum(tensor.shape[:-1].numel() for tensor in kept))


def loss_of(model: Any, chunk: int) -> Tensor:
    return chunked_loss(model, BATCH.input_ids, BATCH.label_index, BATCH.labels, chunk)


@pytest.mark.parametrize("chunk", [1, 4, 5, NUM_LABELS])
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_logits_of_one_chunk_exist_at_a_time(architecture: str, chunk: int) -> None:
    """All chunks were kept for backward, so that nothing was saved."""
    model: Any = tiny_model(architecture).requires_grad_(True)
    watch = HeadWatch(model)
    loss = loss_of(model, chunk)
    chunks = [min(chunk, NUM_LABELS - start) for start in range(0, NUM_LABELS, chunk)]
    assert watch.rows == [1, *chunks]  # one row finds the hidden states
    loss.backward()
    assert watch.rows == [1, *chunks, *reversed(chunks)]
    assert watch.most <= chunk


def test_without_gradients_each_chunk_is_computed_once() -> None:
    """The validation loss, and nothing is computed again."""
    model: Any = tiny_model("gemma2")
    watch = HeadWatch(model)
    with torch.no_grad():
        loss = loss_of(model, 4)
        expected = summed_cross_entropy(
            labelled_logits(model, BATCH.input_ids, BATCH.label_index), BATCH.labels
        )
    assert watch.rows == [1, *[4] * (NUM_LABELS // 4), *[NUM_LABELS % 4] * (NUM_LABELS % 4 > 0), NUM_LABELS]
    assert watch.most <= NUM_LABELS
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


def test_a_micro_batch_that_is_one_chunk_takes_the_short_way() -> None:
    """It would cost a second pass through the head for nothing."""
    model: Any = tiny_model().requires_grad_(True)
    watch = HeadWatch(model)
    for chunk in (None, NUM_LABELS, NUM_LABELS + 1):
        summed_loss(model, BATCH, PRECISIONS["fp32"], chunk).backward()
    assert watch.rows == [NUM_LABELS] * 3


@pytest.mark.parametrize("precision", ["bf16_mixed", "fp16_mixed"])
def test_a_chunk_is_computed_again_in_the_precision_of_its_first_time(precision: str) -> None:
    """Backward runs outside autocast; recomputing there in fp32 gives gradients of other logits."""
    model: Any = lively(tiny_model("llama"), 3.0).requires_grad_(True)
    found: list[tuple[float, Tensor]] = []
    dtypes = set[torch.dtype]()
    model.get_output_embeddings().register_forward_hook(lambda _m, _a, logits: dtypes.add(logits.dtype))
    for chunk in (None, 4):
        model.zero_grad(set_to_none=True)
        loss = summed_loss(model, BATCH, PRECISIONS[precision], chunk)
        loss.backward()
        found.append((loss.item(), model.lm_head.weight.grad.clone()))
    assert dtypes == {PRECISIONS[precision].compute}
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-3)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0.05, atol=0.02)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_model_is_left_as_it_was(architecture: str) -> None:
    """Also by a loss that fails: the decoder must not go on returning the hidden states of a chunk."""
    model: Any = tiny_model(architecture)
    before = model(BATCH.input_ids).logits
    loss_of(model, 4)
    with pytest.raises(RuntimeError, match="out of bounds"):
        chunked_loss(model, BATCH.input_ids, BATCH.label_index, torch.full_like(BATCH.labels, 10**6), 4)
    assert torch.equal(model(BATCH.input_ids).logits, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Unusual(nn.Module):
    """A language model without a decoder of its own, or with one that returns a plain tuple."""

    def __init__(self, with_decoder: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(320, 8)
        self.body = _Tuples()
        self.head = nn.Linear(8, 320, bias=False)
        self.with_decoder = with_decoder

    @property
    def base_model(self) -> nn.Module:
        return self.body if self.with_decoder else self

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert not use_cache
        hidden, nothing = self.body(self.embed(input_ids))
        assert nothing is None
        return SimpleNamespace(logits=self.head(hidden))


class _Tuples(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return hidden.tanh(), None


def test_a_decoder_that_returns_a_tuple() -> None:
    """Code that comes with a model is often older than the classes of outputs."""
    torch.manual_seed(0)
    model = Unusual(with_decoder=True)
    expected = summed_cross_entropy(labelled_logits(model, BATCH.input_ids, BATCH.label_index), BATCH.labels)
    assert float(loss_of(model, 4).detach()) == pytest.approx(float(expected.detach()), rel=1e-6)


def test_a_model_without_a_decoder_of_its_own_is_refused() -> None:
    with pytest.raises(ModelError, match=r"train\.loss_chunk_tokens: Unusual keeps no decoder of its own"):
        loss_of(Unusual(with_decoder=False), 4)
