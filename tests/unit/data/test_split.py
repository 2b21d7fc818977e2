"""Holding records out for validation."""

from __future__ import annotations

import numpy as np
import pytest

from leantune.data.encode import random_records, with_facts
from leantune.data.records import EncodedRecords
from leantune.data.split import split_by_share, take
from leantune.errors import DataError


def _ragged(num_records: int) -> EncodedRecords:
    """Record i has i + 2 tokens, all of them i."""
    base = random_records(num_records, 2, [1], 0)
    lengths = np.arange(num_records) + 2
    supervised = np.ones(lengths.sum(), dtype=np.bool_)
    return with_facts(
        EncodedRecords(
            tokens=np.repeat(np.arange(num_records), lengths).astype(np.int32),
            supervised=supervised,
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            prompt_lengths=np.arange(num_records),
            sample_ids=np.arange(num_records),
            facts=base.facts,
        )
    )


def test_parts_are_disjoint_complete_and_whole_records() -> None:
    records = _ragged(20)
    train, validation = split_by_share(records, 0.25, seed=3)
    assert (len(train), len(validation)) == (15, 5)
    assert sorted([*train.sample_ids, *validation.sample_ids]) == list(range(20))
    for part in (train, validation):
        for i in range(len(part)):
            record = part[i]
            assert record.tokens.tolist() == [record.sample_id] * (record.sample_id + 2)
            assert record.prompt_length == record.sample_id
        assert part.facts.total_tokens == len(part.tokens)
        assert part.facts.num_kept == len(part)


def test_the_draw_follows_the_seed_only() -> None:
    draws = [split_by_share(_ragged(20), 0.25, seed)[1].sample_ids.tolist() for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(("num_records", "share"), [(3, 0.1), (3, 0.9), (1, 0.5)])
def test_an_empty_part_is_refused(num_records: int, share: float) -> None:
    """Validation on no records gave a loss of nan, or training had no step."""
    with pytest.raises(DataError, match="each needs at least one"):
        split_by_share(_ragged(num_records), share, 0)


def test_take_keeps_the_order_asked_for() -> None:
    assert take(_ragged(5), np.array([3, 0])).tokens.tolist() == [3] * 5 + [0] * 2
