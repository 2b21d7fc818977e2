"""Which tokens are edited: the examples of the paper's code, padding, packed rows, small cases by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from leantune.config.positions import parse_position
from leantune.methods import attach
from leantune.models.anatomy import decoder_blocks
from leantune.ops.positions import Tokens, at_indices, first_and_last, join, spans
from tests.models import tiny_model

Pairs = list[tuple[int, int]]  # (flat index, prompt)


def pairs(tokens: Tokens) -> Pairs:
    return list(zip(tokens.flat.tolist(), tokens.prompts.tolist(), strict=True))


def ends(begins: list[int], lengths: list[int], first: int, last: int) -> tuple[Pairs, Pairs]:
    a, b = first_and_last(torch.tensor(begins), torch.tensor(lengths), first, last)
    return pairs(a), pairs(b)


def numbered(prompt: int, flat: Sequence[int]) -> Pairs:
    return [(index, prompt) for index in flat]


@pytest.mark.parametrize(
    ("length", "first", "last", "expected"),
    [
        (10, 2, 3, ([0, 1], [7, 8, 9])),
        (5, 7, 7, ([0, 1], [3, 4])),
        (1, 0, 1, ([], [])),
        (3, 5, 5, ([0], [2])),
        (0, 5, 5, ([], [])),
        (2, 0, 7, ([], [1])),
        (2, 7, 0, ([0], [])),
        (14, 7, 7, ([0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13])),
    ],
)
def test_the_examples(length: int, first: int, last: int, expected: tuple[list[int], list[int]]) -> None:
    found = ends([0], [length], first, last)
    assert found == (numbered(0, expected[0]), numbered(0, expected[1]))


def test_a_prompt_is_counted_from_where_it_begins() -> None:
    """Case 13: positions counted from the left edge of the batch edited the padding. Here two rows of
    16 tokens with 6 and 11 of padding, and a third row that holds two records."""
    begins, lengths = [6, 16 + 11, 32, 32 + 9], [10, 5, 4, 6]
    first, last = ends(begins, lengths, 2, 3)
    assert first == [(6, 0), (7, 0), (27, 1), (28, 1), (32, 2), (33, 2), (41, 3), (42, 3)]
    assert last == [(13, 0), (14, 0), (15, 0), (30, 1), (31, 1), (34, 2), (35, 2), (44, 3), (45, 3), (46, 3)]


def test_every_small_case_equals_the_definition_and_edits_nothing_twice() -> None:
    """With L prompt tokens: min(L // 2, N) first and min(L // 2, M) last ones."""
    for length in range(9):
        for first in range(5):
            for last in range(5):
                half = length // 2
                f, s = min(half, first), min(half, last)
                mine = ends([3, 20], [length, 7], first, last)
                assert mine[0] == numbered(0, range(3, 3 + f)) + numbered(1, range(20, 20 + min(3, first)))
                assert mine[1] == (
                    numbered(0, range(3 + length - s, 3 + length)) + numbered(1, range(27 - min(3, last), 27))
                )
                everything = mine[0] + mine[1]
                assert len(set(everything)) == len(everything)


def test_indices_count_from_either_end_and_skip_what_a_prompt_does_not_have() -> None:
    """-1 and 2 are the same token of a prompt of three: it is edited once; index 5 does not exist there."""
    begins, lengths = torch.tensor([10, 40, 60]), torch.tensor([3, 8, 0])
    found = pairs(at_indices(begins, lengths, [2, -1, 5, -8]))
    assert found == [(12, 0), (42, 1), (47, 1), (45, 1), (40, 1)]


def test_spans_follow_one_another_and_may_be_empty() -> None:
    found = spans(torch.tensor([5, 9, 30]), torch.tensor([2, 0, 3]))
    assert pairs(found) == [(5, 0), (6, 0), (30, 2), (31, 2), (32, 2)]
    assert pairs(spans(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))) == []
    assert pairs(spans(torch.tensor([4]), torch.tensor([0]))) == []


def test_only_the_tokens_of_acting_prompts_are_kept() -> None:
    """Several adapters in one batch: a token of another prompt would get two edits."""
    first = spans(torch.tensor([0, 8]), torch.tensor([2, 1]))
    both = join([first, spans(torch.tensor([3, 11]), torch.tensor([1, 2]))])
    assert pairs(both) == [(0, 0), (1, 0), (8, 1), (3, 0), (11, 1), (12, 1)]
    assert pairs(both.of(torch.tensor([False, True]))) == [(8, 1), (11, 1), (12, 1)]


def edited_columns(
    settings: dict[str, Any], lengths: list[int], width: int, num_rows: int | None = None, **options: Any
) -> list[list[int]]:
    """The columns of each row at which the output of block 1 is another than without the edits."""
    model: Any = tiny_model("llama")
    attached = attach("loreft", model, {"rank": 4, "layers": [1], **settings}, seed=0)
    seen: list[Tensor] = []
    list(decoder_blocks(model).values())[1].register_forward_hook(lambda _m, _a, out: seen.append(out))
    shape = (num_rows or len(lengths), width)
    tokens = torch.randint(3, 300, shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), attached.edits(torch.tensor(lengths), **options):
        model(input_ids=tokens, use_cache=False)
        with attached.disabled():
            model(input_ids=tokens, use_cache=False)
    changed = (seen[0] != seen[1]).any(dim=-1)
    return [torch.nonzero(row).flatten().tolist() for row in changed]


@pytest.mark.parametrize("tied", [True, False])
def test_the_pyreft_alpaca_convention_leaves_the_last_prompt_token_out(tied: bool) -> None:
    """That script counts a prompt one token short: its l1 is the second-to-last, and five tokens of six
    have two halves of two."""
    alpaca = {"positions_convention": "pyreft-alpaca", "tied": tied}
    assert edited_columns({"position": "f1+l1", **alpaca}, [10, 3], 12) == [[0, 8], [0, 1]]
    assert edited_columns({"position": "f1+l1", "tied": tied}, [10, 3], 12) == [[0, 9], [0, 2]]
    assert edited_columns({"position": "f7+l7", **alpaca}, [6, 1], 8) == [[0, 1, 3, 4], []]
    assert edited_columns({"position": "l1", **alpaca}, [2, 4], 6) == [[], [2]]


def test_the_pyreft_alpaca_convention_holds_for_lists_and_all() -> None:
    alpaca = {"positions_convention": "pyreft-alpaca"}
    assert edited_columns({"position": "all", **alpaca}, [4, 1], 5) == [[0, 1, 2], []]
    assert edited_columns({"position": "0;-1", **alpaca}, [4, 2], 5) == [[0, 2], [0]]


def test_left_padding_shifts_what_is_edited() -> None:
    columns = edited_columns({"position": "f2+l3"}, [10, 5], 12, prompt_starts=torch.tensor([2, 7]))
    assert columns == [[2, 3, 9, 10, 11], [7, 8, 10, 11]]


def test_records_that_share_a_row_are_edited_each_for_itself() -> None:
    """Packed rows: the positions of the second prompt are counted from its own start."""
    options = {"prompt_starts": torch.tensor([0, 7]), "rows": torch.tensor([0, 0])}
    assert edited_columns({"position": "f1+l2"}, [4, 5], 14, num_rows=1, **options) == [[0, 2, 3, 7, 10, 11]]


def test_what_untied_interventions_are_made_for_is_what_they_edit() -> None:
    for value in ("f7+l7", "f2", "l3"):
        positions = parse_position(value)
        first, last = ends([0], [20], positions.first, positions.last)
        assert positions.parts == tuple(n for n, found in (("first", first), ("last", last)) if found)
