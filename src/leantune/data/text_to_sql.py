"""A generated text-to-SQL task, small enough for a CPU and graded by running the query.

Each record asks for one SQLite query over one table. The questions follow fixed patterns, so that
the mapping can be learned from a few hundred records; the tables, columns and values of the `eval`
half never occur in the `train` half, so that it must be applied to names that were never seen.
`setup` fills the table such that no near miss (another column, aggregate or filter) gives the
same result as the right query.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from leantune.data.sql_themes import EVAL_THEMES, TRAIN_THEMES, Theme
from leantune.errors import DataError

NUM_ROWS = 12
MAX_TRIES = 2000

Values = dict[str, list[Any]]  # column: its value in each row


@dataclass(frozen=True)
class Table:
    """One filled table: a theme with some of its columns."""

    theme: Theme
    category: str
    number: str
    spare: str | None  # a column of either kind that the question does not ask about
    values: Values

    @property
    def name(self) -> str:
        return self.theme.table

    @property
    def measure(self) -> str:
        """The number column in words."""
        return f"number of {self.number}" if self.number.endswith("s") else self.number

    @property
    def context(self) -> str:
        kinds = {c: "INTEGER" if c in self.theme.numbers else "TEXT" for c in self.values}
        return f"CREATE TABLE {self.name} ({', '.join(f'{c} {k}' for c, k in kinds.items())})"

    @property
    def setup(self) -> list[str]:
        rows = zip(*self.values.values(), strict=True)
        return [f"INSERT INTO {self.name} VALUES ({', '.join(map(_literal, row))})" for row in rows]


@dataclass(frozen=True)
class Question:
    """A question, its query, and wrong queries whose results must differ."""

    text: str
    query: str
    near_misses: list[str]


def generate(num_records: int, seed: int, split: Literal["train", "eval"]) -> list[dict[str, Any]]:
    """Records with `question`, `context`, `answer` (SQL) and `setup` (INSERT statements).

    The same arguments give the same records, and a smaller number gives the first of them.
    No two records share question and context. Raises `DataError` when the combinations run out.
    """
    rng = random.Random(f"text-to-sql {split} {seed}")
    themes = TRAIN_THEMES if split == "train" else EVAL_THEMES
    records, seen, failures = list[dict[str, Any]](), set[tuple[str, str]](), 0
    while len(records) < num_records:
        if failures > MAX_TRIES:
            raise DataError(
                f"text-to-sql: no {num_records} different {split} records can be made, only {len(records)}; "
                "set data.generated_records lower"
            )
        failures += 1
        table = _fill(rng.choice(themes), rng)
        question = KINDS[len(records) % len(KINDS)](table, rng)
        key = (question.text, table.context)
        misses = [*question.near_misses, *_wrong_column(table, question.query)]
        if key in seen or not discriminates(table.context, table.setup, question.query, misses):
            continue
        seen.add(key)
        failures = 0
        records.append(
            {
                "question": question.text,
                "context": table.context,
                "answer": question.query,
                "setup": table.setup,
            }
        )
    return records


def discriminates(context: str, setup: list[str], query: str, near_misses: list[str]) -> bool:
    """Whether the query finds something, and something else than each of the others."""
    connection = sqlite3.connect(":memory:")
    try:
        for statement in (context, *setup):
            connection.execute(statement)
        result = connection.execute(query).fetchall()
        others = [connection.execute(other).fetchall() for other in near_misses]
    finally:
        connection.close()
    found = any(value is not None for row in result for value in row)
    return found and all(result != other for other in others)


def _wrong_column(table: Table, query: str) -> list[str]:
    """The query with the spare column in place of the one that was asked for."""
    spare = table.spare
    if spare is None:
        return []
    wanted = table.number if spare in table.theme.numbers else table.category
    wrong = re.sub(rf"\b{wanted}\b", spare, query)
    return [wrong] if wrong != query else []


def _literal(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


def _fill(theme: Theme, rng: random.Random) -> Table:
    """Choose three or four columns in random order and fill them."""
    category = rng.choice(list(theme.categories))
    number = rng.choice(list(theme.numbers))
    others = [c for c in (*theme.categories, *theme.numbers) if c not in (category, number)]
    spare = rng.choice([*others, None])
    columns = [column for column in (theme.key, category, number, spare) if column]
    rng.shuffle(columns)
    return Table(theme, category, number, spare, {column: _column(theme, column, rng) for column in columns})


def _column(theme: Theme, column: str, rng: random.Random) -> list[Any]:
    if column == theme.key:
        return rng.sample(theme.key_values, NUM_ROWS)
    if column in theme.numbers:
        low, high, step = theme.numbers[column]
        return rng.sample(range(low, high + 1, step), NUM_ROWS)
    # Unequal counts, so that counting another value gives another number.
    names = rng.sample(theme.categories[column], min(4, len(theme.categories[column])))
    counts = (5, 4, 2, 1) if len(names) == 4 else (6, 4, 2)
    values = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    rng.shuffle(values)
    return values


def _threshold(table: Table, rng: random.Random) -> int:
    """A value from the middle of the numbers; it occurs, so that > and >= differ."""
    return sorted(table.values[table.number])[rng.choice((3, 4, 6, 7, 8))]


def _lookup(table: Table, rng: random.Random) -> Question:
    """A column of the one row that a key names."""
    key, (wanted, words) = (
        table.theme.key,
        rng.choice([(table.category, table.category), (table.number, table.measure)]),
    )
    row = rng.randrange(NUM_ROWS)
    name = table.values[key][row]
    text = rng.choice(("What is the {c} of the {s} {v}?", "Show the {c} of the {s} {v}."))
    others = [c for c in table.values if c != wanted]
    query = f"SELECT {wanted} FROM {table.name} WHERE {key} = '{name}'"
    misses = [query.replace(f"SELECT {wanted}", f"SELECT {c}") for c in others]
    return Question(
        text.format(c=words, s=table.theme.singular, v=name),
        query,
        [*misses, f"SELECT {wanted} FROM {table.name}"],
    )


def _by_category(table: Table, rng: random.Random) -> Question:
    key, value = table.theme.key, rng.choice(table.values[table.category])
    text = rng.choice(("Show the {k} of {t} whose {c} is {v}.", "List the {k} of {t} with the {c} {v}."))
    query = f"SELECT {key} FROM {table.name} WHERE {table.category} = '{value}'"
    misses = [
        query.replace(f"SELECT {key}", f"SELECT {table.category}"),
        query.replace(" = ", " != "),
        f"SELECT {key} FROM {table.name}",
    ]
    return Question(text.format(k=key, t=table.name, c=table.category, v=value), query, misses)


def _wrong_signs(condition: str, sign: str) -> list[str]:
    others = [other for other in ("<", ">", "<=", ">=", "=") if other != sign]
    return [condition.replace(f" {sign} ", f" {other} ") for other in others]


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


_COMPARISONS = {">": ("greater than", "above"), "<": ("less than", "below")}


def _by_number(table: Table, rng: random.Random) -> Question:
    key, sign, n = table.theme.key, rng.choice("><"), _threshold(table, rng)
    text = rng.choice(
        ("Show the {k} of {t} whose {c} is {w} {n}.", "List the {k} of {t} with {a} {c} {w} {n}.")
    )
    query = f"SELECT {key} FROM {table.name} WHERE {table.number} {sign} {n}"
    misses = [
        query.replace(f" {sign} ", f" {other} ") for other in ("<", ">", "<=", ">=", "=") if other != sign
    ]
    words = rng.choice(_COMPARISONS[sign])
    shown = text.format(k=key, t=table.name, a=_article(table.measure), c=table.measure, w=words, n=n)
    return Question(shown, query, misses)


def _count(table: Table, rng: random.Random) -> Question:
    """The number of rows under one condition, on a text or on a number."""
    if rng.random() < 0.5:
        value = rng.choice(table.values[table.category])
        words, condition = f"the {table.category} {value}", f"{table.category} = '{value}'"
        wrong = [condition.replace("=", "!=")]
    else:
        sign, n = rng.choice("><"), _threshold(table, rng)
        words = f"{_article(table.measure)} {table.measure} {rng.choice(_COMPARISONS[sign])} {n}"
        condition = f"{table.number} {sign} {n}"
        wrong = _wrong_signs(condition, sign)
    text = rng.choice(("How many {t} have {w}?", "Count the {t} with {w}."))
    query = f"SELECT COUNT(*) FROM {table.name} WHERE {condition}"
    everything = f"SELECT COUNT(*) FROM {table.name}"
    misses = [everything, *(query.replace(condition, other) for other in wrong)]
    return Question(text.format(t=table.name, w=words), query, misses)


_AGGREGATES = {"MAX": "highest", "MIN": "lowest", "AVG": "average", "SUM": "total"}


def _aggregate(table: Table, rng: random.Random) -> Question:
    """Highest, lowest, average or total of a number, over all rows or those of one category."""
    name, where, scope = rng.choice(list(_AGGREGATES)), "", f"all {table.name}"
    if rng.random() < 0.5:
        value = rng.choice(table.values[table.category])
        where, scope = (
            f" WHERE {table.category} = '{value}'",
            f"{table.name} with the {table.category} {value}",
        )
    text = rng.choice(("What is the {w} {c} of {s}?", "Find the {w} {c} of {s}."))
    query = f"SELECT {name}({table.number}) FROM {table.name}{where}"
    misses = [query.replace(name, other) for other in _AGGREGATES if other != name]
    if where:
        misses.append(query.removesuffix(where))
    return Question(text.format(w=_AGGREGATES[name], c=table.measure, s=scope), query, misses)


def _top(table: Table, rng: random.Random) -> Question:
    key, n = table.theme.key, rng.randint(2, 5)
    word, order = rng.choice((("highest", "DESC"), ("lowest", "ASC")))
    text = rng.choice(
        ("Show the {k} of the {n} {t} with the {w} {c}.", "List the {k} of the {n} {t} with the {w} {c}.")
    )
    query = f"SELECT {key} FROM {table.name} ORDER BY {table.number} {order} LIMIT {n}"
    misses = [
        query.replace(order, "ASC" if order == "DESC" else "DESC"),
        query.replace(f"BY {table.number}", f"BY {key}"),
        query.removesuffix(f" LIMIT {n}"),
    ]
    return Question(text.format(k=key, n=n, t=table.name, w=word, c=table.measure), query, misses)


def _groups(table: Table, rng: random.Random) -> Question:
    """How many values a column has, or how many rows each of them has."""
    column = table.category
    if rng.random() < 0.5:
        text = rng.choice(
            ("How many different {c} values do the {t} have?", "Count the different {c} values of the {t}.")
        )
        query = f"SELECT COUNT(DISTINCT {column}) FROM {table.name}"
        misses = [query.replace("DISTINCT ", ""), query.replace(column, table.theme.key)]
    else:
        text = rng.choice(("How many {t} are there for each {c}?", "Count the {t} for each {c}."))
        query = f"SELECT {column}, COUNT(*) FROM {table.name} GROUP BY {column}"
        misses = [
            f"SELECT COUNT(*) FROM {table.name}",
            f"SELECT COUNT(*) FROM {table.name} GROUP BY {column}",
        ]
    return Question(text.format(c=column, t=table.name), query, misses)


def _two_conditions(table: Table, rng: random.Random) -> Question:
    key, row, sign = table.theme.key, rng.randrange(NUM_ROWS), rng.choice("><")
    # Both from one row, so that the second condition can split the rows that fit the first.
    value, n = table.values[table.category][row], table.values[table.number][row]
    words = rng.choice(_COMPARISONS[sign])
    text = rng.choice(
        (
            "Show the {k} of {t} whose {c} is {v} and whose {d} is {w} {n}.",
            "List the {k} of {t} with the {c} {v} and {a} {d} {w} {n}.",
        )
    )
    first, second = f"{table.category} = '{value}'", f"{table.number} {sign} {n}"
    query = f"SELECT {key} FROM {table.name} WHERE {first} AND {second}"
    misses = [
        query.replace(" AND ", " OR "),
        query.replace(f" AND {second}", ""),
        query.replace(f"{first} AND ", ""),
        *_wrong_signs(query, sign),
    ]
    measure = table.measure
    shown = text.format(
        k=key, t=table.name, c=table.category, v=value, a=_article(measure), d=measure, w=words, n=n
    )
    return Question(shown, query, misses)


# One kind after the other, so that any prefix of the records holds equally many of each.
KINDS: tuple[Callable[[Table, random.Random], Question], ...] = (
    _lookup,
    _by_category,
    _by_number,
    _count,
    _aggregate,
    _top,
    _groups,
    _two_conditions,
)
