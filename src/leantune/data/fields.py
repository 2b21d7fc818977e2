"""Fields of a row: the user's column of each, its text, and what is said if it is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from leantune.data.readers import Row
from leantune.errors import DataError

# Other names under which the data sets in circulation keep a field.
ALIASES = {"messages": "conversations"}


def column_of(field: str, columns: Mapping[str, str], found: Iterable[str]) -> str | None:
    """The user's column of a field, if the rows have it."""
    names = [columns[field]] if field in columns else [field, ALIASES.get(field, field)]
    return next((name for name in names if name in found), None)


def value_of(row: Row, field: str, columns: Mapping[str, str]) -> Any:
    """What a row has in the column of a required field; raises `DataError` if it has nothing there."""
    column = column_of(field, columns, row.values)
    if column is None or row.values[column] is None:
        raise missing(row, column or columns.get(field, field), is_null=column is not None)
    return row.values[column]


def text_of(row: Row, field: str, columns: Mapping[str, str], optional: bool) -> str:
    """The text of a field, "" for an optional one that is absent or null."""
    column = columns.get(field, field)
    value = row.values.get(column)
    if value is None:
        if optional:
            return ""
        raise missing(row, column, is_null=column in row.values)
    return as_text(value, row.where, column)


def missing(row: Row, column: str, *, is_null: bool) -> DataError:
    """The error for a required field that a row does not have."""
    found = ", ".join(map(str, row.values)) or "nothing"
    problem = "is null" if is_null else f"is missing (found {found})"
    return DataError(
        f"{row.where}: field {column!r} {problem}; give it a text, remove the record, "
        f"or map another column with data.columns"
    )


def as_text(value: Any, where: str, field: str) -> str:
    """A text or number as text. Raises `DataError` for anything else (true/false, lists, objects)."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(
        f"{where}: field {field!r} is {value!r:.60} ({type(value).__name__}); expected a text or a number"
    )
