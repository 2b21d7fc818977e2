"""Positions in a prompt: every spelling that is accepted, and none that is guessed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from leantune.config.positions import Positions, parse_position


@pytest.mark.parametrize(
    ("value", "position"),
    [
        ("f7+l7", Positions(7, 7)),
        ("f1", Positions(1, 0)),
        ("l1", Positions(0, 1)),
        (" f2 + l3 ", Positions(2, 3)),
        ("f0+l2", Positions(0, 2)),
        ("f10+l0", Positions(10, 0)),
        ("all", Positions(every=True)),
        (" markers ", Positions(markers=True)),
        ("7", Positions(indices=(7,))),
        ("0;3; -1", Positions(indices=(0, 3, -1))),
        ("-2,1", Positions(indices=(-2, 1))),
        ([4, -4], Positions(indices=(4, -4))),
    ],
)
def test_positions_that_are_accepted(value: str | Sequence[int], position: Positions) -> None:
    assert parse_position(value) == position


@pytest.mark.parametrize(
    "value",
    [
        "",
        "+",
        "f",
        "l",
        "f1l1",
        "l1+f1",
        "f1+",
        "+l1",
        "f-1",
        "f0",
        "f0+l0",
        "f1+l1+f2",
        "0;",
        "1.5",
        "every",
    ],
)
def test_positions_that_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="is not a position; write f7"):
        parse_position(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [([], "no positions are listed"), ("3;-1;3", "position 3 is listed twice"), ([0, 0], "position 0 is")],
)
def test_lists_of_positions_that_are_refused(value: str | Sequence[int], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse_position(value)


def test_the_ends_of_a_prompt_are_what_untied_interventions_are_made_for() -> None:
    """`f0+l2` would have made an intervention that edits nothing."""
    spellings = ("f7+l7", "f1", "l1", "f0+l2", "all", "0;-1", "markers")
    assert [parse_position(value).parts for value in spellings] == [
        ("first", "last"),
        ("first",),
        ("last",),
        ("last",),
        (),
        (),
        (),
    ]
