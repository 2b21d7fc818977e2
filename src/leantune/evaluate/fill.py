"""Rows for empty tables on which right and wrong queries give different results.

Rows are of three sorts: those that satisfy every comparison of the gold query, those that miss
exactly one of them narrowly, and unrelated ones. There are no NULLs: the tables that such
questions are asked about are filled, and `COUNT(x)` is then as good as `COUNT(*)`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from leantune.evaluate.sql_text import Condition

Value = str | int | float
ColumnKind = Literal["text", "integer", "real", "date"]

_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "iris", "juniper")


@dataclass(frozen=True)
class Column:
    """A column of a table, and the sort of values it takes; `key`: tables are joined on it."""

    name: str
    kind: ColumnKind
    key: bool = False


def kind_of(declared: str) -> ColumnKind:
    """The sort of values for a declared type, by SQLite's affinity rules and common names."""
    declared = declared.upper()
    if "INT" in declared or "BOOL" in declared:
        return "integer"
    if "CHAR" in declared or "CLOB" in declared or "TEXT" in declared or not declared:
        return "text"
    if "DATE" in declared or "TIME" in declared:
        return "date"
    return "real" if re.search(r"REAL|FLOA|DOUB|NUM|DEC|MONEY", declared) else "text"


class Filler:
    """Draws rows around the comparisons of one query; `loose` are its other literals."""

    def __init__(self, conditions: Sequence[Condition], loose: Sequence[Value], draw: random.Random) -> None:
        self._conditions = conditions
        self._loose = list(loose)
        self._draw = draw

    def rows(self, columns: Sequence[Column], count: int) -> Iterator[list[Value]]:
        """`count` rows for a table with these columns."""
        compared = [column for column in columns if self._about(column)]
        # Each comparison has more rows that miss only it than there are matches: a MIN or MAX that
        # leaves it out then seldom comes out right.
        sorts: list[Column | Literal["match", "other"]] = ["match", *compared, *compared, "other"]
        for _ in range(count):
            sort = self._draw.choice(sorts)
            yield [
                self._other(column)
                if sort == "other" or column not in compared
                else self._value(column, satisfied=column != sort)
                for column in columns
            ]

    def _about(self, column: Column) -> list[Condition]:
        return [condition for condition in self._conditions if condition.column == column.name.lower()]

    def _value(self, column: Column, *, satisfied: bool) -> Value:
        condition = self._draw.choice(self._about(column))
        if isinstance(condition.literal, str):
            return self._text(condition, satisfied)
        return self._number(condition, satisfied)

    def _text(self, condition: Condition, satisfied: bool) -> Value:
        text = str(condition.literal)
        if condition.operator in ("like", "glob"):
            text = re.sub(r"[%*]", lambda _: self._draw.choice(("", *_WORDS)), text)
            text = re.sub(r"[_?]", lambda _: self._draw.choice("abcxyz"), text)
        equal = condition.operator not in ("!=", "<", ">")
        if equal == satisfied:
            return text
        near = [text + " x", "x " + text, text[:-1], text.swapcase(), self._draw.choice(_WORDS)]
        return self._draw.choice([value for value in near if value != text])

    def _number(self, condition: Condition, satisfied: bool) -> Value:
        literal = condition.literal
        assert not isinstance(literal, str)
        step = self._draw.choice((1, 1, 2, 3, 7))
        signs = {">": 1, ">=": 1, "<": -1, "<=": -1}
        if condition.operator in signs:
            away = signs[condition.operator] * step
            boundary = literal if self._draw.random() < 0.6 else None
            if boundary is not None and condition.operator.endswith("=") == satisfied:
                return boundary
            return literal + away if satisfied else literal - away
        equal = condition.operator != "!="
        if equal == satisfied:
            return literal
        return literal + self._draw.choice((-step, step))

    def _other(self, column: Column) -> Value:
        draw = self._draw
        fitting = [v for v in self._loose if isinstance(v, str) == (column.kind in ("text", "date"))]
        if fitting and draw.random() < 0.3:
            return draw.choice(fitting)
        if column.kind == "integer":
            return draw.randint(1, 12 if column.key else 1_000)
        if column.kind == "real":
            return round(draw.uniform(0, 100), 2)
        if column.kind == "date":
            return f"{draw.randint(1990, 2024)}-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}"
        return draw.choice(_WORDS) + draw.choice(("", "", " 2", " 17"))
