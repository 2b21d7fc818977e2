"""Which tokens are edited: the examples of the paper's code, padding, and every small case by hand."""

from __future__ import annotations

import pytest
import torch

from leantune.ops.positions import edited_positions


def positions(
    lengths: list[int], first: int, last: int, starts: list[int] | None = None, width: int = 16
) -> tuple[list[int], list[int]]:
    begin = torch.tensor(starts if starts is not None else [0] * len(lengths))
    a, b = edited_positions(torch.tensor(lengths), begin, width, first, last)
    return a.tolist(), b.tolist()


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
    assert positions([length], first, last) == expected


def test_left_padding_shifts_the_prompt_and_nothing_else() -> None:
    """Case 13: positions counted from the left edge of the batch edited the padding."""
    assert positions([10], 2, 3, [6]) == ([6, 7], [13, 14, 15])
    assert positions([5], 7, 7, [11]) == ([11, 12], [14, 15])


def test_rows_are_counted_by_the_width_of_the_batch() -> None:
    first, last = positions([10, 1, 5], 2, 3, width=12)
    assert first == [0, 1, 24, 25]
    assert last == [7, 8, 9, 27, 28]


def test_every_small_case_equals_the_definition_and_edits_nothing_twice() -> None:
    """With L prompt tokens: min(L // 2, N) first and min(L // 2, M) last ones."""
    for length in range(9):
        for first in range(5):
            for last in range(5):
                half = length // 2
                f, s = min(half, first), min(half, last)
                mine = positions([length, 7], first, last, [3, 2])
                assert mine[0][:f] == [3 + i for i in range(f)]
                assert mine[1][:s] == [3 + length - s + i for i in range(s)]
                everything = mine[0] + mine[1]
                assert len(set(everything)) == len(everything)
                assert len(everything) == f + s + min(3, first) + min(3, last)
