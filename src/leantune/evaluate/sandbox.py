"""SQLite databases in memory on which queries that nobody has checked can be run.

A query may only read: no writes, no ATTACH, no PRAGMA, no extensions, no files; its time, its
rows and the size of its values are bounded.
"""

from __future__ import annotations

import random
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from leantune.errors import DataError
from leantune.evaluate.fill import Column, Filler, kind_of
from leantune.evaluate.sql_text import literals

Row = tuple[Any, ...]

MAX_ROWS = 10_000
MAX_SIZE = 10_000_000
_LONGEST_QUERY = 20_000
# So few that a chain of slow function calls cannot outrun the clock.
_INSTRUCTIONS_BETWEEN_CHECKS = 50
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 50_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 500,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_NEVER = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA, sqlite3.SQLITE_CREATE_VTABLE}
# They load code, touch files, or spend unbounded time and memory in one uninterruptible call.
_DANGEROUS = re.compile(
    r"load_extension|readfile|writefile|edit|fts3_tokenizer|printf|format|randomblob|zeroblob"
)


class QueryError(Exception):
    """A query that is refused, wrong, or too expensive."""


@dataclass(frozen=True)
class Result:
    """What a query returned; column names are left out, since they carry no answer."""

    num_columns: int
    rows: list[Row]


class Sandbox:
    """A database made of `CREATE TABLE` statements, to be used in a `with` block.

    Raises `DataError` if the statements do not run; `query` raises `QueryError`.
    """

    def __init__(self, context: str, setup: Sequence[str] = (), *, time_limit_seconds: float = 1.0) -> None:
        self._connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
        self._time_limit = time_limit_seconds
        self._deadline = float("inf")
        try:
            self._connection.execute("PRAGMA temp_store = MEMORY")  # large sorts must not make files
            for limit, value in _LIMITS.items():
                self._connection.setlimit(limit, value)
            self._connection.set_progress_handler(self._over_time, _INSTRUCTIONS_BETWEEN_CHECKS)
            self._connection.set_authorizer(_allow_building)
            self._build(context, setup)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def _build(self, context: str, setup: Sequence[str]) -> None:
        for name, script in [("context", context), *(("setup", statement) for statement in setup)]:
            try:
                with self._timed():
                    self._connection.executescript(script)
            except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
                raise DataError(f"{name} is not SQL that SQLite runs ({error}): {script[:200]!r}") from error

    def fill(self, gold: str, num_rows: int, seed: int) -> None:
        """Put seeded rows into every empty table; they hold the literals of `gold` and near misses."""
        tables = _with_keys({name: self._columns(name) for name in self._empty_tables()})
        names = frozenset(column.name.lower() for columns in tables.values() for column in columns)
        conditions, loose = literals(gold, names)
        filler = Filler(conditions, loose, random.Random(seed))
        for table, columns in tables.items():
            self._insert(table, columns, filler.rows(columns, num_rows))

    def _insert(self, table: str, columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> None:
        holes = ", ".join("?" for _ in columns)
        into = ", ".join(quote(column.name) for column in columns)
        try:
            with self._timed():
                # IGNORE: a row that breaks a UNIQUE or CHECK constraint is left out.
                self._connection.executemany(
                    f"INSERT OR IGNORE INTO {quote(table)} ({into}) VALUES ({holes})", rows
                )
        except (sqlite3.Error, OverflowError) as error:
            raise DataError(f"table {table!r} of the context cannot be filled: {error}") from error

    def query(self, sql: str) -> Result:
        """Run one read-only statement."""
        if len(sql) > _LONGEST_QUERY:
            raise QueryError(f"longer than {_LONGEST_QUERY} characters")
        self._connection.set_authorizer(_allow_reading)
        try:
            with self._timed():
                cursor = self._connection.execute(sql)
                if cursor.description is None:
                    raise QueryError("not a query")
                rows = _bounded(cursor)
                cursor.close()
        # ValueError: null bytes and lone surrogates; MemoryError: a value that does not fit.
        except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
            raise QueryError(str(error)) from error
        finally:
            self._connection.set_authorizer(_allow_building)
        return Result(len(cursor.description), rows)

    def _empty_tables(self) -> list[str]:
        names = self._read("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        return [name for (name,) in names if not self._read(f"SELECT 1 FROM {quote(name)} LIMIT 1")]

    def _columns(self, table: str) -> list[Column]:
        found = self._read("SELECT name, type FROM pragma_table_info(?)", table)
        return [Column(name, kind_of(declared)) for name, declared in found]

    def _read(self, sql: str, *values: str) -> list[Row]:
        self._connection.set_authorizer(None)
        try:
            return self._connection.execute(sql, values).fetchall()
        finally:
            self._connection.set_authorizer(_allow_building)

    @contextmanager
    def _timed(self) -> Generator[None, None, None]:
        self._deadline = time.monotonic() + self._time_limit
        try:
            yield
        finally:
            self._deadline = float("inf")

    def _over_time(self) -> int:
        return int(time.monotonic() > self._deadline)


def _bounded(cursor: sqlite3.Cursor) -> list[Row]:
    rows: list[Row] = []
    size = 0
    for row in cursor:
        rows.append(row)
        size += sum(len(value) for value in row if isinstance(value, str | bytes))
        if len(rows) > MAX_ROWS or size > MAX_SIZE:
            raise QueryError(f"a result of more than {MAX_ROWS} rows or {MAX_SIZE} characters")
    return rows


def _with_keys(tables: dict[str, list[Column]]) -> dict[str, list[Column]]:
    """Mark columns that several tables share, or that are called an id, as those of joins."""
    shared = Counter(column.name.lower() for columns in tables.values() for column in columns)

    def is_key(name: str) -> bool:
        return shared[name.lower()] > 1 or re.search(r"(?:^|_|\b)(?:id|ID|Id)$|[a-z]I[dD]$", name) is not None

    return {
        table: [replace(column, key=is_key(column.name)) for column in columns]
        for table, columns in tables.items()
    }


def quote(identifier: str) -> str:
    """An SQL identifier in double quotes."""
    return '"' + identifier.replace('"', '""') + '"'


def _allow_building(action: int, *details: str | None) -> int:
    return sqlite3.SQLITE_DENY if action in _NEVER or _is_dangerous(action, details) else sqlite3.SQLITE_OK


def _allow_reading(action: int, *details: str | None) -> int:
    allowed = action in _READING and not _is_dangerous(action, details)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _is_dangerous(action: int, details: Sequence[str | None]) -> bool:
    name = details[1] if action == sqlite3.SQLITE_FUNCTION and len(details) > 1 else None
    return name is not None and _DANGEROUS.fullmatch(name.lower()) is not None
