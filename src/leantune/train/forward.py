"""The forward passes that training, evaluation and use share: token losses, answers, and trained heads."""

from __future__ import annotations

import math

from torch import Tensor, nn

from leantune.data.batches import MicroBatch
from leantune.errors import ModelError
from leantune.methods import Attached
from leantune.methods.head import head_of
from leantune.models.head import chunked_loss, final_hidden, labelled_logits
from leantune.models.precision import Precision
from leantune.ops.loss import summed_cross_entropy
from leantune.ops.preference import sequence_log_probs


def summed_loss(
    model: nn.Module, batch: MicroBatch, precision: Precision, loss_chunk_tokens: int | None = None
) -> Tensor:
    """The sum of the token losses of a micro-batch (a scalar). Call it inside `Attached.edits`.

    With `loss_chunk_tokens`, logits of so many labelled positions exist at a time.
    """
    with precision.autocast(batch.input_ids.device):
        if loss_chunk_tokens is None or len(batch.labels) <= loss_chunk_tokens:
            return summed_cross_entropy(
                labelled_logits(model, batch.input_ids, batch.label_index), batch.labels
            )
        return chunked_loss(model, batch.input_ids, batch.label_index, batch.labels, loss_chunk_tokens)


def head_outputs(attached: Attached, batch: MicroBatch, precision: Precision) -> Tensor:
    """What the trained head says of each sequence, read at its last token: fp32 [B, outputs]."""
    head = head_of(attached)
    if head is None:
        raise ModelError(
            f"{attached.name} has no trained head; train one with objective: classification or reward"
        )
    with precision.autocast(batch.input_ids.device):
        hidden = final_hidden(attached.model, batch.input_ids, batch.last_index)
    return head.module(hidden)


def answer_log_probs(model: nn.Module, batch: MicroBatch, precision: Precision) -> Tensor:
    """The log-probabilities of the supervised tokens of each sequence, summed: fp32 [B]."""
    rows, width = batch.input_ids.shape
    with precision.autocast(batch.input_ids.device):
        logits = labelled_logits(model, batch.input_ids, batch.label_index)
    return sequence_log_probs(logits, batch.labels, batch.label_index // width, rows)


def perplexity(mean_loss: float) -> float:
    """exp of the mean loss per token (nats); infinite where that overflows."""
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf
