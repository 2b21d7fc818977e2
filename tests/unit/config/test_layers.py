"""Layer lists: every spelling that is accepted, and none that is guessed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from leantune.config.layers import parse_layers


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
