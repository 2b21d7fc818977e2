"""Windows, micro-batches and ranks: the same records in the same steps, however the work is split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from leantune.data.batches import collate, cut_window, deal, epoch_windows
from leantune.data.records import DataFacts, EncodedRecords, IntArray

FACTS = DataFacts("test", "text", "plain", 0, 0, 0)


def records_of(lengths: Sequence[int], prompts: Sequence[int] | None = None, seed: int = 0) -> EncodedRecords:
    """Records of these lengths; the first tokens (by default one) carry no loss."""
    prompts = prompts or [1] * len(lengths)
    generator = np.random.default_rng(seed)
    tokens = [generator.integers(3, 300, length).astype(np.int32) for length in lengths]
    supervised = [np.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)]
    return EncodedRecords(
        tokens=np.concatenate(tokens),
        supervised=np.concatenate(supervised),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.array(prompts),
        sample_ids=np.arange(len(lengths)) * 10,
        facts=FACTS,
    )


def alpaca_like(count: int = 2000) -> IntArray:
    """Token counts as instruction data has them: most near 100, a long tail."""
    generator = np.random.default_rng(7)
    return np.clip(generator.lognormal(4.6, 0.6, count), 20, 1024).astype(np.int64)


def content(windows: list[IntArray]) -> list[list[int]]:
    return [sorted(window.tolist()) for window in windows]


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("count", "batch"), [(1, 4), (5, 2), (8, 4), (103, 8), (1000, 3)])
def test_an_epoch_holds_every_record_once_with_a_true_tail(count: int, batch: int, grouped: bool) -> None:
    """Case 8: tails were dropped, or filled up with records that then counted twice."""
    windows = epoch_windows(alpaca_like(count), batch, seed=3, epoch=0, group_by_length=grouped)
    assert sorted(np.concatenate(windows).tolist()) == list(range(count))
    sizes = [len(window) for window in windows]
    assert len(sizes) == -(-count // batch)
    assert sorted(sizes)[1:] == [batch] * (len(sizes) - 1)


def test_epochs_and_seeds_have_orders_of_their_own_that_repeat() -> None:
    lengths = alpaca_like(200)
    first = content(epoch_windows(lengths, 8, 3, 0, True))
    assert content(epoch_windows(lengths, 8, 3, 0, True)) == first
    assert content(epoch_windows(lengths, 8, 3, 1, True)) != first
    assert content(epoch_windows(lengths, 8, 4, 0, True)) != first


@pytest.mark.parametrize("grouped", [True, False])
def test_long_and_short_records_come_in_a_random_order(grouped: bool) -> None:
    """Sorting by length must not turn the epoch into a curriculum."""
    lengths = alpaca_like()
    windows = epoch_windows(lengths, 8, 0, 0, grouped)
    means = np.array([lengths[window].mean() for window in windows])
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.2


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_any_split_trains_on_the_records_of_the_window(micro_batch_size: int, world_size: int) -> None:
    """Windows know neither ranks nor micro-batches; together all ranks see each record once."""
    records = records_of(alpaca_like(50).tolist())
    window = cut_window(records, np.arange(3, 29), micro_batch_size)
    seen = [
        int(index)
        for rank in range(world_size)
        for chunk in deal(len(window.chunks), rank, world_size)
        for index in window.chunks[chunk]
    ]
    assert sorted(seen) == list(range(3, 29))
    assert all(len(chunk) <= micro_batch_size for chunk in window.chunks)
    assert window.total_tokens == int(records.lengths[3:29].sum())
    assert window.supervised_tokens == window.total_tokens - 26


def test_micro_batches_are_cut_at_the_same_places_for_any_order_of_the_window() -> None:
    records = records_of([5, 9, 5, 7, 9, 5, 7])
    indices = np.array([6, 2, 0, 4, 1, 3, 5])
    cuts = [c.tolist() for c in cut_window(records, indices, 3).chunks]
    assert cuts == [[1, 4, 3], [6, 0, 2], [5]]
    assert [c.tolist() for c in cut_window(records, np.sort(indices), 3).chunks] == cuts


def test_padding_is_a_few_percent_on_instruction_data() -> None:
    """Random batches of such records are padded by half."""
    lengths = alpaca_like()
    records = records_of(lengths.tolist())

    def padding(grouped: bool) -> float:
        cut = [cut_window(records, w, 4) for w in epoch_windows(lengths, 32, 0, 0, grouped)]
        return 1 - sum(w.total_tokens for w in cut) / sum(w.padded_tokens for w in cut)

    assert padding(True) < 0.08
    assert padding(True) < padding(False)
    single = epoch_windows(lengths, 4, 0, 0, True)
    small = [cut_window(records, w, 4) for w in single]
    assert 1 - sum(w.total_tokens for w in small) / sum(w.padded_tokens for w in small) < 0.08


def test_the_padding_share_counts_the_slots_that_go_through_the_model() -> None:
    window = cut_window(records_of([10, 4, 6]), np.arange(3), 2)
    assert (window.padded_tokens, window.total_tokens) == (2 * 10 + 4, 20)
    assert window.padding_share == pytest.approx(1 - 20 / 24)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_dealing_covers_all_chunks_once_and_evenly(world_size: int) -> None:
    for num_chunks in range(14):
        hands = [deal(num_chunks, rank, world_size) for rank in range(world_size)]
        assert sorted(chunk for hand in hands for chunk in hand) == list(range(num_chunks))
        sizes = [len(hand) for hand in hands]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_dealing_shares_the_long_chunks_out(world_size: int) -> None:
    """Dealing in turn would give rank 0 the longer chunk of every round."""
    lengths = np.arange(world_size * 16)[::-1] + 10
    loads = [int(lengths[deal(len(lengths), rank, world_size)].sum()) for rank in range(world_size)]
    assert max(loads) == min(loads)
    tail = [int(lengths[deal(len(lengths) - 1, rank, world_size)].sum()) for rank in range(world_size)]
    assert max(tail) - min(tail) <= int(lengths[-1])


def test_a_batch_is_what_its_records_say() -> None:
    records = records_of([4, 6, 3], prompts=[2, 3, 1])
    batch = collate(records, [2, 1], pad_id=0, seed=9)
    assert batch.sample_ids == (20, 10)
    assert batch.input_ids.shape == (2, 6)
    assert batch.input_ids.dtype == batch.labels.dtype == batch.label_index.dtype == torch.int64
    assert batch.input_ids[0].tolist() == [*records[2].tokens.tolist(), 0, 0, 0]
    assert batch.input_ids[1].tolist() == records[1].tokens.tolist()
    assert batch.prompt_lengths.tolist() == [1, 3]
    assert batch.label_index.tolist() == [0, 1, 8, 9, 10]  # row * 6 + position before each target
    assert batch.seed == 9


def test_every_label_is_the_token_after_its_position() -> None:
    records = records_of(alpaca_like(9).tolist(), prompts=[1, 3, 5, 2, 9, 4, 1, 1, 12])
    batch = collate(records, range(9), pad_id=0)
    width = batch.input_ids.shape[1]
    assert torch.equal(batch.input_ids.flatten()[batch.label_index + 1], batch.labels)
    assert bool(((batch.label_index + 1) % width != 0).all()), "a label must not cross into the next row"
    supervised = [int(records[i].supervised.sum()) for i in range(9)]
    assert len(batch.labels) == sum(supervised)


def test_a_pad_id_that_is_a_real_token_masks_none_of_its_occurrences() -> None:
    """Case 4: with pad = eos, masking by id removed the end of every answer from the loss."""
    records = records_of([5, 3], prompts=[2, 1])
    eos = 7
    records.tokens[[4, 7]] = eos  # the last token of each record
    records.tokens[2] = eos  # and one in the middle of an answer
    with_eos, with_other = collate(records, [0, 1], pad_id=eos), collate(records, [0, 1], pad_id=0)
    assert torch.equal(with_eos.labels, with_other.labels)
    assert torch.equal(with_eos.label_index, with_other.label_index)
    assert with_eos.labels.tolist().count(eos) == 3


def test_several_supervised_spans_in_one_record() -> None:
    """Multi-turn records: every assistant turn carries loss, what lies between does not."""
    records = records_of([8], prompts=[2])
    records.supervised[:] = [False, False, True, True, False, False, True, True]
    batch = collate(records, [0], pad_id=0)
    assert batch.label_index.tolist() == [1, 2, 5, 6]
    assert batch.labels.tolist() == records.tokens[[2, 3, 6, 7]].tolist()
