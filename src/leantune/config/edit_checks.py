"""Rules between the data and a method that edits hidden states: markers, and the `subspaces` of records."""

from __future__ import annotations

from typing import Any

from leantune.config.axes import Method, ReftMethod, parts_of
from leantune.config.method_checks import largest_rank
from leantune.config.schema import RunConfig
from leantune.config.subspaces import Subspaces


def check_edits(config: RunConfig) -> list[str]:
    """Every problem of `data.markers` and of a mapped `subspaces` column with the method."""
    return [*_check_markers(config), *_check_column(config)]


def chosen_subspaces(config: RunConfig) -> Subspaces | None:
    """What the field `subspaces` of records chooses from.

    None: such a field means nothing here, as neither the method names subspaces nor data.columns a column.
    """
    section = _reft_of(config.method)
    if section is None or not (section.subspaces or "subspaces" in config.data.columns):
        return None
    return Subspaces.read(largest_rank(section), section.subspaces)


def _reft_of(method: Method) -> ReftMethod[Any] | None:
    return next((part for part in parts_of(method) if isinstance(part, ReftMethod)), None)


def _check_markers(config: RunConfig) -> list[str]:
    markers, wanted = config.data.markers, _goes_by_markers(config.method)
    if markers is None:
        missing = "data.markers: method.position is markers; name the two strings, e.g. ['[[', ']]']"
        return [missing] if wanted else []
    if not wanted:
        return ["data.markers: has no effect here, because no method.position is markers; remove the key"]
    if config.data.train in ("dummy", "text-to-sql"):
        return [f"method.position: markers, but the records of {config.data.train} have none; use another"]
    if "" in markers or markers[0] == markers[1]:
        return [f"data.markers: {list(markers)} must be two different strings that are not empty"]
    return []


def _goes_by_markers(method: Method) -> bool:
    section = _reft_of(method)
    if section is None:
        return False
    positions = [group.position or section.position for group in section.interventions]
    return "markers" in [p.strip() for p in positions or [section.position] if isinstance(p, str)]


def _check_column(config: RunConfig) -> list[str]:
    if "subspaces" not in config.data.columns or _reft_of(config.method) is not None:
        return []
    return [
        f"data.columns: subspaces has no effect here, because method {config.method.name} has no subspaces; "
        "remove the field"
    ]
