"""The mean loss of some records, and what else their objective measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from leantune.data.batches import MicroBatch, collate, cut_window, deal
from leantune.data.records import EncodedRecords
from leantune.methods import Attached
from leantune.models.precision import Precision
from leantune.strategies.placement import Placement
from leantune.train.objectives import Objective


class Means(NamedTuple):
    """Means over so many units of an objective; `measures` by name."""

    loss: float
    units: int
    measures: dict[str, float]


@torch.no_grad()
def mean_loss(
    attached: Attached,
    objective: Objective,
    records: EncodedRecords,
    *,
    device: torch.device,
    micro_batch_size: int,
    pad_id: int,
    precision: Precision,
    rank: int = 0,
    world_size: int = 1,
    placement: Placement | None = None,
    edit_options: Mapping[str, Any] | None = None,
    passes: Callable[[MicroBatch], AbstractContextManager[object]] = nullcontext,
) -> Means:
    """Means over all records; ranks share the work.

    `edit_options` are told to `Attached.edits` besides what the records say; each micro-batch goes through
    the model inside `passes` of it.
    """
    model: nn.Module = attached.model
    was_training = model.training
    model.eval()
    window = cut_window(records, np.arange(len(records)), micro_batch_size)
    total = torch.zeros(1 + len(objective.measures), dtype=torch.float32, device=device)
    mine = deal(len(window.chunks), rank, world_size)
    idle = 0
    if placement is not None and placement.equal_passes:
        idle = math.ceil(len(window.chunks) / world_size) - len(mine)
    for number, chunk in enumerate([*(window.chunks[i] for i in mine), *[window.chunks[-1]] * idle]):
        batch = collate(records, chunk, pad_id).to(device)
        with passes(batch), objective.sums(attached, batch, precision, edit_options) as sums:
            values: list[Tensor] = [sums.loss, *sums.measures]
        if number < len(mine):
            total += torch.stack([value.float() for value in values])
    if placement is not None:
        placement.end_passes()
        placement.sum_over_ranks([total])
    model.train(was_training)
    units = objective.units(window)
    loss, *measures = (total / units).tolist()
    named = dict(zip(objective.measures, measures, strict=True))
    return Means(loss, units, {**objective.summaries(loss), **named})
