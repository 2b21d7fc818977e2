"""Layer lists and positions: every spelling that is accepted, and none that is guessed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from leantune.config.layers import parse_layers, parse_position


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        ("all", None),
        (" all ", None),
        ("8;19", (8, 19)),
        ("8,19", (8, 19)),
        (" 19 ; 8 ", (8, 19)),
        ("0-3;19", (0, 1, 2, 3, 19)),
        ("5-5", (5,)),
        ("0", (0,)),
        ([3, 1], (1, 3)),
        ((7,), (7,)),
    ],
)
def test_layers_that_are_accepted(value: str | Sequence[int], layers: tuple[int, ...] | None) -> None:
    assert parse_layers(value) == layers


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", "is not a list of layers"),
        ("8;", "is not a list of layers"),
        ("8 19", "is not a list of layers"),
        ("last", "is not a list of layers"),
        ("-1", "is not a list of layers"),
        ("1.5", "is not a list of layers"),
        ("3-1", "runs backwards"),
        ("8;8", "layer 8 is listed twice"),
        ("0-3;2", "layer 2 is listed twice"),
        ([1, 1], "layer 1 is listed twice"),
        ([-1], "layer -1 is negative"),
        ([], "no layers are listed"),
    ],
)
def test_layers_that_are_refused(value: str | Sequence[int], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse_layers(value)


@pytest.mark.parametrize(
    ("value", "position"),
    [
        ("f7+l7", (7, 7)),
        ("f1", (1, 0)),
        ("l1", (0, 1)),
        (" f2 + l3 ", (2, 3)),
        ("f0+l2", (0, 2)),
        ("f10+l0", (10, 0)),
    ],
)
def test_positions_that_are_accepted(value: str, position: tuple[int, int]) -> None:
    assert parse_position(value) == position


@pytest.mark.parametrize(
    "value", ["", "+", "f", "l", "f1l1", "l1+f1", "f1+", "+l1", "7", "f-1", "f0", "f0+l0", "f1+l1+f2", "all"]
)
def test_positions_that_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="is not a position"):
        parse_position(value)
