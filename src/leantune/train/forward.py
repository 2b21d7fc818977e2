"""The loss of some records: the one forward pass that training and evaluation share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from leantune.data.batches import MicroBatch, collate, cut_window, deal
from leantune.data.records import EncodedRecords
from leantune.methods import Attached
from leantune.models.head import labelled_logits
from leantune.ops.loss import summed_cross_entropy


def summed_loss(model: PreTrainedModel, batch: MicroBatch, autocast: bool) -> Tensor:
    """The sum of the token losses of a micro-batch (a scalar). Call it inside `Attached.edits`."""
    context = torch.autocast(batch.input_ids.device.type, torch.bfloat16) if autocast else nullcontext()
    with context:
        logits = labelled_logits(model, batch.input_ids, batch.label_index)
    return summed_cross_entropy(logits, batch.labels)


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
    autocast: bool,
    rank: int = 0,
    world_size: int = 1,
    sum_over_ranks: Callable[[Sequence[Tensor]], None] = lambda _tensors: None,
) -> tuple[float, int]:
    """Mean loss over the supervised tokens of all records, and their number; ranks share the work."""
    was_training = model.training
    model.eval()
    window = cut_window(records, np.arange(len(records)), micro_batch_size)
    total = torch.zeros(1, dtype=torch.float32, device=device)
    for index in deal(len(window.chunks), rank, world_size):
        batch = collate(records, window.chunks[index], pad_id).to(device)
        with attached.edits(batch.prompt_lengths):
            total += summed_loss(model, batch, autocast)
    sum_over_ranks([total])
    model.train(was_training)
    return float(total) / window.supervised_tokens, window.supervised_tokens
