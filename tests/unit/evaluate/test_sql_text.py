"""SQL is found in whatever a model wrapped it in, and read as SQLite reads it."""

from __future__ import annotations

import pytest

from leantune.evaluate.sql_text import Condition, extract_sql, is_ordered, literals

QUERY = "SELECT a FROM t WHERE b = 'x;y'"


@pytest.mark.parametrize(
    "text",
    [
        QUERY,
        f"  {QUERY} ;\n",
        f"SQL: {QUERY}",
        f"SQL query:\n{QUERY};",
        f"The query: {QUERY}",
        f"Answer: {QUERY}; SELECT 2",
        f"```sql\n{QUERY};\n```",
        f"Here it is:\n```SQL\n{QUERY}\n```\nIt selects a.",
        f"```\n{QUERY}\n```",
        f"```sql\n{QUERY}",
        f"{QUERY}\n```",
        f"{QUERY};\n```python\nprint(1)\n```",
        f"{QUERY}\n\nThis selects a from t.",
        f"To select the value of a, use {QUERY}",
        f"The answer is {QUERY}; as you see.",
        f";{QUERY};",
    ],
)
def test_the_query_is_taken_out_of_an_answer(text: str) -> None:
    assert extract_sql(text) == QUERY


@pytest.mark.parametrize(
    ("text", "sql"),
    [
        ("select a from t", "select a from t"),
        ("I would select a from t", "select a from t"),
        ("WITH x AS (SELECT 1\n\n) SELECT * FROM x", "WITH x AS (SELECT 1\n\n) SELECT * FROM x"),
        ("DROP TABLE t; SELECT a FROM t", "DROP TABLE t"),
        ("SQL: DELETE FROM t; SELECT a FROM t", "DELETE FROM t"),
        ("SELECT a -- first; column\nFROM t; x", "SELECT a -- first; column\nFROM t"),
        ("SELECT 'it''s; ok' FROM t;", "SELECT 'it''s; ok' FROM t"),
        ('SELECT "a;b" FROM t; x', 'SELECT "a;b" FROM t'),
        ("no idea", "no idea"),
        ("", ""),
        (";;", ""),
    ],
)
def test_the_first_statement_is_the_answer(text: str, sql: str) -> None:
    assert extract_sql(text) == sql


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("SELECT a FROM t order  /* by */ by a", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT a FROM t WHERE b = ' ORDER BY '", False),
        ('SELECT "order by" FROM t', False),
        ("SELECT rank() OVER (ORDER BY a) FROM t", False),
    ],
)
def test_only_the_outermost_order_counts(sql: str, ordered: bool) -> None:
    assert is_ordered(sql) is ordered


def test_literals_are_attributed_to_the_columns_they_are_compared_with() -> None:
    sql = (
        "SELECT a FROM t WHERE t.\"b c\" = 'it''s' AND a NOT IN (1, -2) AND d BETWEEN 3 AND 4.5 "
        'OR a <> 6 AND LOWER(e) LIKE "x%" AND 7 < 8 LIMIT 9'
    )
    conditions, loose = literals(sql, frozenset({"a", "b c", "d", "e"}))
    assert conditions == [
        Condition("b c", "=", "it's"),
        Condition("a", "!=", 1),
        Condition("a", "!=", -2),
        Condition("d", "between", 3),
        Condition("d", "between", 4.5),
        Condition("a", "!=", 6),
        Condition("e", "like", "x%"),
    ]
    assert loose == [7, 8, 9]
