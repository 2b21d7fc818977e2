"""Holds a share of the records out for validation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from leantune.data.encode import with_facts
from leantune.data.records import EncodedRecords, IntArray
from leantune.errors import DataError


def split_by_share(records: EncodedRecords, share: float, seed: int) -> tuple[EncodedRecords, EncodedRecords]:
    """Training and validation records: a seeded draw, each part in its original order.

    In the facts of the parts, `num_records`, `num_truncated` and `dropped` describe the source
    before the split. Raises `DataError` if a part would be empty.
    """
    num_validation = round(len(records) * share)
    if not 0 < num_validation < len(records):
        raise DataError(
            f"data.validation_share: {share} of {len(records)} usable records leaves {num_validation} for "
            f"validation and {len(records) - num_validation} for training; each needs at least one"
        )
    order = np.random.default_rng(seed).permutation(len(records))
    validation, train = np.sort(order[:num_validation]), np.sort(order[num_validation:])
    return take(records, train), take(records, validation)


def take(records: EncodedRecords, indices: IntArray) -> EncodedRecords:
    """The records at these indices, int64 [k], in this order."""
    sequences = records.sequences_of(indices)
    lengths = records.sequence_lengths[sequences]
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    # Position of every chosen token in the flat arrays: its place in its sequence plus that one's start.
    flat = np.arange(offsets[-1]) + np.repeat(records.offsets[sequences] - offsets[:-1], lengths)
    return with_facts(
        replace(
            records,
            tokens=records.tokens[flat],
            supervised=records.supervised[flat],
            offsets=offsets,
            prompt_lengths=records.prompt_lengths[sequences],
            sample_ids=records.sample_ids[indices],
            marked=None if records.marked is None else records.marked[flat],
            subspaces=None if records.subspaces is None else records.subspaces[indices],
            targets=None if records.targets is None else records.targets[indices],
        )
    )
