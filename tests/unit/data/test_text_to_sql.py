"""The generated text-to-SQL task: disjoint halves, and answers that can be graded by running them."""

from __future__ import annotations

import re
import sqlite3
from typing import Any

import pytest

from leantune.data import text_to_sql
from leantune.data.sql_themes import EVAL_THEMES, TRAIN_THEMES, Theme
from leantune.data.text_to_sql import KINDS, Question, discriminates, generate
from leantune.errors import DataError


def _words(themes: tuple[Theme, ...]) -> set[str]:
    """Every table, column, noun and value."""
    words: set[str] = set()
    for theme in themes:
        words |= {
            theme.table,
            theme.singular,
            theme.key,
            *theme.key_values,
            *theme.numbers,
            *theme.categories,
        }
        words |= {value for values in theme.categories.values() for value in values}
    return words


def _names(record: dict[str, Any]) -> set[str]:
    """The table and the columns of a record."""
    table, _, columns = record["context"].removeprefix("CREATE TABLE ").partition(" ")
    return {table, *re.findall(r"(\w+) (?:TEXT|INTEGER)", columns)}


def _run(record: dict[str, Any], query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(":memory:")
    for statement in (record["context"], *record["setup"]):
        connection.execute(statement)
    result = connection.execute(query).fetchall()
    connection.close()
    return result


def test_eval_names_and_values_never_occur_in_train() -> None:
    """A score on names that were trained on would measure memory."""
    assert not _words(TRAIN_THEMES) & _words(EVAL_THEMES)
    train = {name for record in generate(200, 0, "train") for name in _names(record)}
    evaluation = {name for record in generate(100, 0, "eval") for name in _names(record)}
    assert not train & evaluation
    assert len(train) > 30


@pytest.mark.parametrize("split", ["train", "eval"])
def test_gold_queries_run_and_find_something(split: Any) -> None:
    for record in generate(160, 1, split):
        result = _run(record, record["answer"])
        assert any(value is not None for row in result for value in row), record
        assert len(record["setup"]) == 12


@pytest.mark.parametrize("split", ["train", "eval"])
def test_changed_filters_aggregates_and_orders_give_other_results(split: Any) -> None:
    """A wrong query was graded as right because the data could not tell the two apart."""
    swaps = [
        (" > ", " < "),
        (" < ", " > "),
        ("MAX", "MIN"),
        ("AVG", "SUM"),
        ("DESC", "ASC"),
        (" AND ", " OR "),
    ]
    swaps += [(" = '", " != '"), ("DISTINCT ", ""), (" > ", " >= "), (" < ", " <= "), ("ASC", "DESC")]
    changed = 0
    for record in generate(400, 2, split):
        for old, new in swaps:
            if old in record["answer"]:
                changed += 1
                wrong = record["answer"].replace(old, new)
                assert _run(record, wrong) != _run(record, record["answer"]), (record, wrong)
    assert changed > 100


def test_records_are_seeded_distinct_and_prefix_stable() -> None:
    records = generate(400, 3, "train")
    assert records[:50] == generate(50, 3, "train")
    assert records[:50] != generate(50, 4, "train")
    assert len({(r["question"], r["context"]) for r in records}) == 400


def test_every_kind_occurs_equally_often() -> None:
    answers = [record["answer"] for record in generate(80, 5, "train")]
    assert len(KINDS) == 8
    assert sum("ORDER BY" in answer for answer in answers) == 10
    assert sum(" AND " in answer for answer in answers) == 10
    assert sum(bool(re.search(r"(MAX|MIN|AVG|SUM)\(", answer)) for answer in answers) == 10


def test_questions_name_every_value_of_their_query() -> None:
    """A value that the question does not name cannot be answered."""
    for record in generate(160, 6, "eval"):
        for value in re.findall(r"'(\w+)'|(?:[<>]|LIMIT) (\d+)", record["answer"]):
            assert "".join(value) in record["question"], record


def test_running_out_of_combinations_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looped for ever."""
    monkeypatch.setattr(text_to_sql, "EVAL_THEMES", EVAL_THEMES[:1])
    monkeypatch.setattr(text_to_sql, "KINDS", (lambda table, rng: Question("same", "SELECT 1", []),))
    monkeypatch.setattr(text_to_sql, "MAX_TRIES", 50)
    with pytest.raises(DataError, match=r"set data.generated_records lower"):
        generate(2000, 0, "eval")


def test_discriminates_rejects_empty_and_equal_results() -> None:
    context, setup = "CREATE TABLE t (a INTEGER)", ["INSERT INTO t VALUES (1)"]
    assert discriminates(context, setup, "SELECT a FROM t", ["SELECT a + 1 FROM t"])
    assert not discriminates(context, setup, "SELECT a FROM t WHERE a > 1", [])
    assert not discriminates(context, setup, "SELECT MAX(a) FROM t WHERE a > 1", [])
    assert not discriminates(context, setup, "SELECT MAX(a) FROM t", ["SELECT MIN(a) FROM t"])
