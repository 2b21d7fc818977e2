"""The schema as help text and as JSON schema; both come from the field descriptions."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from leantune.config.precision import precision_table_text
from leantune.config.schema import RunConfig

# Keys whose values need more than a sentence.
_TABLES: dict[str, Callable[[], str]] = {"train.precision": precision_table_text}


def _sections_of(annotation: Any, in_lists: bool) -> list[type[BaseModel]]:
    """The section classes that a field may hold (several for the axes)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is tuple and not in_lists:
        return []
    return [section for part in get_args(annotation) for section in _sections_of(part, in_lists)]


def iterate_fields(
    section: type[BaseModel] = RunConfig, prefix: str = "", tag: str | None = None, in_lists: bool = False
) -> Iterator[tuple[str, str | None, FieldInfo]]:
    """All leaf keys as (dotted key, value of the axis it belongs to or None, field).

    A list of sections is a value, whose keys its description names; `in_lists`: they are keys as well.
    """
    for name, field in section.model_fields.items():
        children = _sections_of(field.annotation, in_lists)
        if not children:
            yield f"{prefix}{name}", tag, field
        for child in children:
            child_tag = str(child.model_fields["name"].default) if len(children) > 1 else tag
            yield from iterate_fields(child, f"{prefix}{name}.", child_tag, in_lists)


def known_keys(tag: str | None = None, in_lists: bool = False) -> list[str]:
    """All dotted keys; with `tag`, without those that belong to other values of the axis it is a value of."""
    keys = [(key, owner) for key, owner, _ in iterate_fields(in_lists=in_lists)]
    axes = {key.partition(".")[0] for key, owner in keys if owner is not None and owner == tag}
    return [key for key, owner in keys if owner in (None, tag) or key.partition(".")[0] not in axes]


def help_text() -> str:
    """Every key with its type, default and description, grouped by section."""
    lines: list[str] = []
    seen: set[tuple[str, str | None]] = set()
    section = ""
    for key, tag, field in iterate_fields():
        head = key.split(".")[0]
        if head != section:
            section = head
            lines += ["", f"{section}: {RunConfig.model_fields[section].description}"]
        if (key, tag) in seen:
            continue
        seen.add((key, tag))
        owner = f" [{tag}]" if tag else ""
        lines.append(f"  {key}{owner} = {_default(field)}")
        lines.append(f"      {field.description}")
        if key in _TABLES:
            lines.append(textwrap.indent(_TABLES[key](), " " * 6))
    return "\n".join(lines).strip("\n")


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "{}"
    if field.default is PydanticUndefined:
        return "(required)"
    default: Any = field.default
    if isinstance(default, tuple):  # a section in a list goes by its name
        default = [getattr(item, "name", item) for item in default]  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    return json.dumps(default) if not isinstance(default, str) else default


def json_schema() -> str:
    """The JSON schema of a run file, for editors."""
    schema = RunConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "leantune run"
    return json.dumps(schema, indent=2)
