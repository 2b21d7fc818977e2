"""Execution match of SQL: two queries are equal if they return the same on several databases.

The idea of several databases is that of distilled test suites (arXiv 2010.02840): on a single
one a wrong query is too often right by chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from leantune.errors import DataError
from leantune.evaluate.sandbox import QueryError, Result, Row, Sandbox
from leantune.evaluate.sql_text import extract_sql, is_ordered

__all__ = ["SqlExecution", "extract_sql", "same_result"]


@dataclass(frozen=True)
class SqlExecution:
    """Compares queries by running them on SQLite databases in memory.

    Without INSERTs of its own, a record gets `num_databases` databases with `num_rows` seeded rows
    in each table. `time_limit_seconds` bounds each query.
    """

    num_rows: int = 25
    num_databases: int = 8
    seed: int = 0
    time_limit_seconds: float = 1.0

    def match(self, context: str, predicted: str, gold: str, setup: Sequence[str] | None = None) -> bool:
        """Whether one statement, `predicted`, returns the same rows as `gold`.

        context: one or more CREATE TABLE; setup: INSERTs. Rows are compared in order if `gold`
        has an ORDER BY, else as a multiset; numbers with a tolerance; column names do not count.
        A prediction that is not one readable SELECT does not match. `extract_sql` takes the
        statement out of a model's text. Raises `DataError` if context, setup or `gold` do not run.
        """
        told, tried = 0, 0
        # A database on which the gold query finds nothing tells little: a few more are tried.
        while told < self.num_databases and tried < 3 * self.num_databases:
            with Sandbox(context, setup or (), time_limit_seconds=self.time_limit_seconds) as database:
                if not setup:
                    database.fill(gold, self.num_rows, seed=self.seed * 1_000 + tried)
                try:
                    expected = database.query(gold)
                except QueryError as error:
                    raise DataError(f"the gold query does not run ({error}): {gold!r}") from error
                try:
                    found = database.query(predicted)
                except QueryError:
                    return False
            if not same_result(found, expected, ordered=is_ordered(gold)):
                return False
            tried += 1
            told += _tells(expected.rows)
            if setup:
                break
        return True


def same_result(found: Result, expected: Result, *, ordered: bool) -> bool:
    """Whether two results have as many columns and the same rows (as a multiset unless `ordered`)."""
    if found.num_columns != expected.num_columns or len(found.rows) != len(expected.rows):
        return False
    left, right = found.rows, expected.rows
    if not ordered:
        left, right = sorted(left, key=_sort_key), sorted(right, key=_sort_key)
    return all(_same_row(a, b) for a, b in zip(left, right, strict=True))


def _tells(rows: Sequence[Row]) -> bool:
    """Whether a result says more than "nothing found"."""
    return any(value is not None and value != 0 for row in rows for value in row)


def _same_row(left: Row, right: Row) -> bool:
    return all(_same_value(a, b) for a, b in zip(left, right, strict=True))


def _same_value(left: object, right: object) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    if isinstance(left, int | float) and isinstance(right, int | float):
        return math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-9)
    return type(left) is type(right) and left == right


def _sort_key(row: Row) -> list[tuple[int, float, str]]:
    return [_value_key(value) for value in row]


def _value_key(value: object) -> tuple[int, float, str]:
    """NULLs, then numbers (rounded, so that 0.1 + 0.2 sorts like 0.3), then texts, then blobs."""
    if value is None:
        return (0, 0.0, "")
    if isinstance(value, int | float):
        return (1, float(f"{value:.7g}"), "")
    return (2, 0.0, value) if isinstance(value, str) else (3, 0.0, repr(value))
