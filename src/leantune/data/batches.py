"""Which records form which step, and as what tensors.

An epoch is a sequence of windows (the records of one optimizer step). Windows depend on the
seed, the epoch and the global batch size alone; micro-batches are cut from a window sorted
by length and dealt to the ranks. So one rank and N ranks train on the same windows, cut at
the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from leantune.data.records import EncodedRecords, IntArray

# Records of this many windows are sorted by length together: enough for little padding,
# while which records meet in a window stays random.
_WINDOWS_PER_POOL = 50


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. Legend: B sequences, T longest of them, N labelled positions, R records.

    A record is one sequence, or two that stand side by side: a chosen and a rejected answer.

    input_ids: int64 [B, T], padded to the right; lengths: int64 [B], tokens of each sequence, of which
    prompt_lengths: int64 [B] are its prompt; label_index: int64 [N], flat positions (row * T + column) whose
    logits predict labels: int64 [N]; seed: what dropout of this micro-batch is seeded with; marked: bool
    [B, T], subspaces: bool [B, rank] and targets: int64 [R] as in `EncodedRecords`. What says where edits
    are stays on the CPU, so that positions are worked out without waiting for a device.
    """

    sample_ids: tuple[int, ...]
    input_ids: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    label_index: Tensor
    labels: Tensor
    seed: int
    marked: Tensor | None = None
    subspaces: Tensor | None = None
    targets: Tensor | None = None

    @property
    def last_index(self) -> Tensor:
        """Flat position of the last token of each sequence, int64 [B], on the device."""
        starts = torch.arange(len(self.lengths)) * self.input_ids.shape[1]
        return (starts + self.lengths - 1).to(self.input_ids.device)

    @property
    def edit_options(self) -> dict[str, Any]:
        """What `Attached.edits` is told besides the lengths of the prompts."""
        options = {"ends": self.lengths, "marked": self.marked, "subspaces": self.subspaces}
        return {name: value for name, value in options.items() if value is not None}

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            label_index=self.label_index.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            targets=None if self.targets is None else self.targets.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class Window:
    """The records of one step, cut into micro-batches (indices into the encoded records)."""

    chunks: tuple[IntArray, ...]
    supervised_tokens: int
    total_tokens: int
    padded_tokens: int

    @property
    def num_records(self) -> int:
        """Records of the step, of all ranks."""
        return sum(len(chunk) for chunk in self.chunks)

    @property
    def padding_share(self) -> float:
        """Padding as a share of the slots that go through the model."""
        return 1.0 - self.total_tokens / self.padded_tokens


def epoch_windows(
    lengths: IntArray,
    global_batch_size: int,
    seed: int,
    epoch: int,
    group_by_length: bool,
    reshuffle: Literal["records", "windows"] = "records",
) -> list[IntArray]:
    """The windows of an epoch: every record once, one window possibly smaller.

    `reshuffle`: each epoch draws its windows anew, or only the order of those of the first epoch.
    """
    generator = np.random.default_rng([seed, epoch])
    if reshuffle == "windows" and epoch > 0:
        first = epoch_windows(lengths, global_batch_size, seed, 0, group_by_length)
        return [first[i] for i in generator.permutation(len(first))]
    order = generator.permutation(len(lengths))
    if not group_by_length:
        return _cut(order, global_batch_size)
    pool = global_batch_size * _WINDOWS_PER_POOL
    pools = [p[np.argsort(-lengths[p], kind="stable")] for p in _cut(order, pool)]
    windows = [window for p in pools for window in _cut(p, global_batch_size)]
    return [windows[i] for i in generator.permutation(len(windows))]


def cut_window(records: EncodedRecords, indices: IntArray, micro_batch_size: int) -> Window:
    """Cut a window into micro-batches of records of similar length, longest first."""
    lengths, many = records.lengths, records.sequences_per_record
    widths = records.sequence_lengths.reshape(-1, many).max(axis=1)
    ordered = indices[np.lexsort((indices, -lengths[indices]))]
    chunks = tuple(_cut(ordered, micro_batch_size))
    return Window(
        chunks=chunks,
        supervised_tokens=sum(
            int(records.sequence(int(i)).supervised.sum()) for i in records.sequences_of(indices)
        ),
        total_tokens=int(lengths[indices].sum()),
        padded_tokens=sum(int(widths[chunk].max()) * len(chunk) * many for chunk in chunks),
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
    rows = [records.sequence(int(number)) for number in records.sequences_of(indices)]
    width = max(len(row.tokens) for row in rows)
    input_ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    marked = np.zeros((len(rows), width), dtype=np.bool_)
    label_index: list[IntArray] = []
    labels: list[IntArray] = []
    for number, row in enumerate(rows):
        input_ids[number, : len(row.tokens)] = row.tokens
        marked[number, : len(row.tokens)] = False if row.marked is None else row.marked
        targets = np.flatnonzero(row.supervised)
        label_index.append(number * width + targets - 1)  # token t is predicted at t - 1
        labels.append(row.tokens[targets].astype(np.int64))
    return MicroBatch(
        sample_ids=tuple(row.sample_id for row in rows[:: records.sequences_per_record]),
        input_ids=torch.from_numpy(input_ids),
        lengths=torch.tensor([len(row.tokens) for row in rows]),
        prompt_lengths=torch.tensor([row.prompt_length for row in rows]),
        label_index=torch.from_numpy(np.concatenate(label_index)),
        labels=torch.from_numpy(np.concatenate(labels)),
        seed=seed,
        marked=None if records.marked is None else torch.from_numpy(marked),
        subspaces=None
        if records.subspaces is None
        else torch.from_numpy(np.array([row.subspaces for row in rows])),
        targets=None if records.targets is None else torch.from_numpy(records.targets[np.asarray(indices)]),
    )


def _cut(indices: IntArray, size: int) -> list[IntArray]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]
