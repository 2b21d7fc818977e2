"""The loss of some records: the one forward pass that training and evaluation share."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from leantune.data.batches import MicroBatch, collate, cut_window, deal
from leantune.data.records import EncodedRecords
from leantune.methods import Attached
from leantune.models.head import chunked_loss, labelled_logits
from leantune.models.precision import Precision
from leantune.ops.loss import summed_cross_entropy
from leantune.strategies.placement import Placement


def summed_loss(
    model: PreTrainedModel, batch: MicroBatch, precision: Precision, loss_chunk_tokens: int | None = None
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


def perplexity(mean_loss: float) -> float:
    """exp of the mean loss per token (nats); infinite where that overflows."""
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf


@torch.no_grad()
def mean_loss(
    model: PreTrainedModel,
    attached: Attached,
    records: EncodedRecords,
    *,
    device: torch.device,
    micro_batch_size: int,
    pad_id: int,
    precision: Precision,
    loss_chunk_tokens: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    placement: Placement | None = None,
) -> tuple[float, int]:
    """Mean loss over the supervised tokens of all records, and their number; ranks share the work."""
    was_training = model.training
    model.eval()
    window = cut_window(records, np.arange(len(records)), micro_batch_size)
    total = torch.zeros(1, dtype=torch.float32, device=device)
    mine = deal(len(window.chunks), rank, world_size)
    idle = 0
    if placement is not None and placement.equal_passes:
        idle = math.ceil(len(window.chunks) / world_size) - len(mine)
    for number, chunk in enumerate([*(window.chunks[i] for i in mine), *[window.chunks[-1]] * idle]):
        batch = collate(records, chunk, pad_id).to(device)
        with attached.edits(batch.prompt_lengths):
            loss = summed_loss(model, batch, precision, loss_chunk_tokens)
        if number < len(mine):
            total += loss
    if placement is not None:
        placement.end_passes()
        placement.sum_over_ranks([total])
    model.train(was_training)
    return float(total) / window.supervised_tokens, window.supervised_tokens
