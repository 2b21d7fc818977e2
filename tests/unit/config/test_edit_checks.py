"""Markers and subspaces: what goes with the method, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from leantune.config import RunConfig, validate
from leantune.config.edit_checks import chosen_subspaces
from leantune.config.subspaces import Subspaces, read_choice
from leantune.errors import ConfigError

BY_MARKERS = {"name": "loreft", "position": "markers"}
PAIR = ["[[", "]]"]


def _config(method: Any, **data: Any) -> RunConfig:
    return validate({"model": "demo", "data": {"train": "a.jsonl", **data}, "method": method}, {})


@pytest.mark.parametrize(
    "method",
    [
        BY_MARKERS,
        {"name": "direft", "interventions": [{"layers": 3, "position": "markers"}]},
        ["lora", BY_MARKERS],
    ],
)
def test_markers_are_asked_for_exactly_where_something_goes_by_them(method: Any) -> None:
    assert _config(method, markers=PAIR).data.markers == ("[[", "]]")
    with pytest.raises(ConfigError, match=r"data\.markers: method\.position is markers; name the two"):
        _config(method)


@pytest.mark.parametrize("method", ["lora", "loreft", "full", ["lora", "loreft"]])
def test_markers_that_nothing_goes_by_are_refused(method: Any) -> None:
    """They would have been taken out of the text without any effect."""
    with pytest.raises(ConfigError, match=r"data\.markers: has no effect here"):
        _config(method, markers=PAIR)


@pytest.mark.parametrize("markers", [["", "]]"], ["[[", ""], ["**", "**"]])
def test_markers_must_be_told_apart(markers: list[str]) -> None:
    with pytest.raises(ConfigError, match="two different strings that are not empty"):
        _config(BY_MARKERS, markers=markers)


def test_generated_records_have_no_markers() -> None:
    with pytest.raises(ConfigError, match="the records of dummy have none"):
        _config(BY_MARKERS, train="dummy", markers=PAIR)


def test_a_mapped_column_needs_a_method_that_has_subspaces() -> None:
    """The column was read by nobody."""
    columns = {"subspaces": "style"}
    with pytest.raises(
        ConfigError, match=r"data\.columns: subspaces has no effect here, because method lora"
    ):
        _config("lora", columns=columns)
    assert chosen_subspaces(_config("loreft", columns=columns)) == Subspaces(8, {})


def test_the_field_counts_if_it_is_mapped_or_named() -> None:
    assert chosen_subspaces(_config("lora")) is None
    assert chosen_subspaces(_config({"name": "loreft", "rank": 4})) is None
    named = {"name": "loreft", "rank": 4, "subspaces": {"formal": "0-1", "sql": [3]}}
    expected = Subspaces(4, {"formal": (0, 1), "sql": (3,)})
    assert chosen_subspaces(_config(named)) == expected
    assert chosen_subspaces(_config(["lora", named])) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"formal": "0-8"}, "formal: dimension 8 does not exist; the rank is 8: 0 to 7"),
        ({"formal": "5-2"}, "formal: the range '5-2' runs backwards"),
        ({"formal": "x"}, "formal: 'x' is not a list of dimensions"),
        ({"a,b": "0"}, "'a,b' is not a name"),
        ({"3": "0"}, "'3' is not a name"),
        ({" ": "0"}, "' ' is not a name"),
    ],
)
def test_names_that_could_not_be_chosen_are_refused(names: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"method\.subspaces: {expected}"):
        _config({"name": "loreft", "subspaces": names})


def test_choices_are_lists_or_texts_with_commas() -> None:
    assert read_choice("formal, 3 ,sql") == ("formal", 3, "sql")
    assert read_choice(["formal", 3]) == ("formal", 3)
    assert read_choice(2) == (2,)
    with pytest.raises(ValueError, match="no subspace is listed"):
        read_choice([])
