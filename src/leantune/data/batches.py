"""Which records form which step, and as what tensors.

An epoch is a sequence of windows (the records of one optimizer step). Windows depend on the
seed, the epoch and the global batch size alone; micro-batches are cut from a window sorted
by length and dealt to the ranks. So one rank and N ranks train on the same windows, cut at
the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leantune.data.records import EncodedRecords, IntArray

# Records of this many windows are sorted by length together: enough for little padding,
# while which records meet in a window stays random.
_WINDOWS_PER_POOL = 50


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. Legend: B records, T longest of them, N labelled positions.

    input_ids: int64 [B, T], padded to the right; prompt_lengths: int64 [B];
    label_index: int64 [N], flat positions (row * T + column) whose logits predict labels: int64 [N];
    seed: what dropout of this micro-batch is seeded with. prompt_lengths stay on the CPU, so that
    positions are worked out without waiting for a device.
    """

    sample_ids: tuple[int, ...]
    input_ids: Tensor
    prompt_lengths: Tensor
    label_index: Tensor
    labels: Tensor
    seed: int

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        return MicroBatch(
            self.sample_ids,
            self.input_ids.to(device, non_blocking=True),
            self.prompt_lengths,
            self.label_index.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.seed,
        )


@dataclass(frozen=True)
class Window:
    """The records of one step, cut into micro-batches (indices into the encoded records)."""

    chunks: tuple[IntArray, ...]
    supervised_tokens: int
    total_tokens: int
    padded_tokens: int

    @property
    def padding_share(self) -> float:
        """Padding as a share of the slots that go through the model."""
        return 1.0 - self.total_tokens / self.padded_tokens


def epoch_windows(
    lengths: IntArray, global_batch_size: int, seed: int, epoch: int, group_by_length: bool
) -> list[IntArray]:
    """The windows of an epoch: every record once, the last window possibly smaller."""
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
    if not group_by_length:
        return _cut(order, global_batch_size)
    pool = global_batch_size * _WINDOWS_PER_POOL
    pools = [p[np.argsort(-lengths[p], kind="stable")] for p in _cut(order, pool)]
    windows = [window for p in pools for window in _cut(p, global_batch_size)]
    return [windows[i] for i in generator.permutation(len(windows))]


def cut_window(records: EncodedRecords, indices: IntArray, micro_batch_size: int) -> Window:
    """Cut a window into micro-batches of records of similar length, longest first."""
    lengths = records.lengths
    ordered = indices[np.lexsort((indices, -lengths[indices]))]
    chunks = tuple(_cut(ordered, micro_batch_size))
    return Window(
        chunks=chunks,
        supervised_tokens=sum(int(records[int(i)].supervised.sum()) for i in indices),
        total_tokens=int(lengths[indices].sum()),
        padded_tokens=sum(int(lengths[chunk].max()) * len(chunk) for chunk in chunks),
    )


def deal(num_chunks: int, rank: int, world_size: int) -> list[int]:
    """Which chunks a rank takes: there and back again, so that the longest are shared out evenly."""
    mine: list[int] = []
    for start in range(0, num_chunks, world_size):
        forwards = (start // world_size) % 2 == 0
        position = start + (rank if forwards else world_size - 1 - rank)
        if position < num_chunks:
            mine.append(position)
    return mine


def collate(
    records: EncodedRecords, indices: Sequence[int] | IntArray, pad_id: int, seed: int = 0
) -> MicroBatch:
    """Tensors of some records. Padding is known by position, never by its id."""
    rows = [records[int(index)] for index in indices]
    width = max(len(row.tokens) for row in rows)
    input_ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    label_index: list[IntArray] = []
    labels: list[IntArray] = []
    for number, row in enumerate(rows):
        input_ids[number, : len(row.tokens)] = row.tokens
        targets = np.flatnonzero(row.supervised)
        label_index.append(number * width + targets - 1)  # token t is predicted at t - 1
        labels.append(row.tokens[targets].astype(np.int64))
    return MicroBatch(
        sample_ids=tuple(row.sample_id for row in rows),
        input_ids=torch.from_numpy(input_ids),
        prompt_lengths=torch.tensor([row.prompt_length for row in rows]),
        label_index=torch.from_numpy(np.concatenate(label_index)),
        labels=torch.from_numpy(np.concatenate(labels)),
        seed=seed,
    )


def _cut(indices: IntArray, size: int) -> list[IntArray]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]
