"""Execution match tells right queries from nearly right ones, and untrusted ones do no harm."""

# ruff: noqa: E501
from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from leantune.errors import DataError
from leantune.evaluate.sandbox import QueryError, Result, Sandbox
from leantune.evaluate.sql import SqlExecution, same_result

STAFF = (
    "CREATE TABLE staff (id INTEGER PRIMARY KEY, name VARCHAR, age INTEGER, pay REAL, team_id INTEGER);"
    "CREATE TABLE team (id INTEGER PRIMARY KEY, name TEXT UNIQUE, city VARCHAR NOT NULL)"
)
ODD = 'CREATE TABLE t_1 ("Time/Retired" VARCHAR, "No. in ""season""" INTEGER, "2006" REAL, "Start date" DATE)'

JOINED = "SELECT s.name FROM staff s JOIN team t ON s.team_id = t.id WHERE t.city = 'Oslo' AND s.age > 30"
GROUPED = "SELECT city, COUNT(*) FROM team GROUP BY city HAVING COUNT(*) >= 1 ORDER BY city DESC"


def execution_match(
    context: str, predicted: str, gold: str, setup: list[str] | None = None, seed: int = 0
) -> bool:
    return SqlExecution(seed=seed).match(context, predicted, gold, setup)


@pytest.mark.parametrize(
    ("context", "gold", "same"),
    [
        (STAFF, "SELECT name FROM staff WHERE age > 30", "select NAME from STAFF where 30 < age;"),
        (STAFF, "SELECT name FROM staff WHERE age > 30", "SELECT name AS n FROM staff WHERE age >= 31"),
        (STAFF, "SELECT name FROM staff WHERE age > 30", "SELECT name FROM staff WHERE age > 30 ORDER BY 1"),
        (STAFF, JOINED, "SELECT name FROM staff WHERE age>30 AND team_id IN (SELECT id FROM team WHERE city='Oslo')"),
        (STAFF, "SELECT AVG(pay) FROM staff", "SELECT SUM(pay) / COUNT(pay) FROM staff"),
        (STAFF, "SELECT COUNT(*) FROM staff", "SELECT 1.0 * COUNT(id) FROM staff"),
        (STAFF, "SELECT MAX(age) FROM staff", "SELECT age FROM staff ORDER BY age DESC LIMIT 1"),
        (STAFF, 'SELECT age FROM staff WHERE name = "Ann"', "SELECT age FROM staff WHERE name = 'Ann'"),
        (STAFF, GROUPED, GROUPED.replace("COUNT(*)", "COUNT(id)")),
        (ODD, 'SELECT "Start date" FROM t_1 WHERE "2006" < 5.5', 'SELECT [Start date] FROM t_1 WHERE `2006` < 5.5'),
    ],
)  # fmt: skip
def test_queries_that_mean_the_same_match(context: str, gold: str, same: str) -> None:
    assert execution_match(context, same, gold)
    assert execution_match(context, gold, gold, seed=7)


@pytest.mark.parametrize(
    ("gold", "wrong"),
    [
        ("SELECT name FROM staff WHERE age > 30", "SELECT name FROM staff WHERE age >= 30"),
        ("SELECT name FROM staff WHERE age > 30", "SELECT name FROM staff WHERE age > 31"),
        ("SELECT name FROM staff WHERE age > 30", "SELECT name FROM staff WHERE age < 30"),
        ("SELECT name FROM staff WHERE age > 30", "SELECT name FROM staff"),
        ("SELECT name FROM staff WHERE age > 30", "SELECT DISTINCT name FROM staff WHERE age > 30"),
        ("SELECT name FROM staff WHERE age > 30", "SELECT name, age FROM staff WHERE age > 30"),
        ("SELECT age FROM staff WHERE name = 'Ann Lee'", "SELECT age FROM staff WHERE name = 'Ann'"),
        ("SELECT age FROM staff WHERE name = 'Ann Lee'", "SELECT age FROM staff WHERE name = 'ann lee'"),
        ("SELECT age FROM staff WHERE name LIKE 'A%'", "SELECT age FROM staff WHERE name LIKE '%A%'"),
        ("SELECT age FROM staff WHERE name NOT LIKE 'A%'", "SELECT age FROM staff WHERE name LIKE 'A%'"),
        ("SELECT name FROM staff WHERE age BETWEEN 3 AND 9", "SELECT name FROM staff WHERE age BETWEEN 3 AND 8"),
        ("SELECT name FROM staff WHERE age IN (3, 4)", "SELECT name FROM staff WHERE age = 3"),
        ("SELECT name FROM staff WHERE age = -4", "SELECT name FROM staff WHERE age = 4"),
        ("SELECT COUNT(*) FROM staff WHERE age > 30 AND pay < 9.5", "SELECT COUNT(*) FROM staff WHERE age > 30"),
        ("SELECT MIN(pay) FROM staff WHERE age > 30 AND name = 'x'", "SELECT MIN(pay) FROM staff WHERE age > 30"),
        ("SELECT MAX(age) FROM staff", "SELECT MIN(age) FROM staff"),
        ("SELECT SUM(age) FROM staff", "SELECT AVG(age) FROM staff"),
        (JOINED, JOINED.replace("Oslo", "Paris")),
        (JOINED, JOINED.replace(" AND s.age > 30", "")),
        (JOINED, JOINED.replace("t.id", "s.id")),
        (GROUPED, GROUPED.replace("DESC", "ASC")),
        (GROUPED, GROUPED.replace("ORDER BY city DESC", "")),
    ],
)  # fmt: skip
def test_nearly_right_queries_do_not_match(gold: str, wrong: str) -> None:
    assert not execution_match(STAFF, wrong, gold)


def test_rows_given_as_setup_are_the_only_ones() -> None:
    setup = [
        "INSERT INTO staff VALUES (1, 'Ann', 30, 1.5, 1)",
        "INSERT INTO staff VALUES (2, 'Bo', 40, 2.5, 1)",
    ]
    assert execution_match(STAFF, "SELECT 2", "SELECT COUNT(*) FROM staff", setup)
    assert not execution_match(STAFF, "SELECT 2", "SELECT COUNT(*) FROM staff")


def test_rows_are_the_same_for_a_seed_and_others_for_another() -> None:
    def rows(seed: int) -> Result:
        with Sandbox(STAFF) as database:
            database.fill(JOINED, 25, seed)
            return database.query("SELECT name, age, pay, team_id FROM staff")

    assert rows(3) == rows(3)
    assert rows(3) != rows(4)
    assert len(rows(3).rows) >= 8


HARMFUL = [
    "DROP TABLE staff",
    "DELETE FROM staff",
    "UPDATE staff SET age = 1",
    "INSERT INTO staff (name) VALUES ('x')",
    "CREATE TABLE x (a)",
    "ATTACH 'stolen.db' AS s",
    "VACUUM INTO 'stolen.db'",
    "PRAGMA table_info(staff)",
    "PRAGMA temp_store_directory = '.'",
    "SELECT * FROM pragma_database_list",
    "SELECT load_extension('evil')",
    "WITH x AS (SELECT 1) DELETE FROM staff",
    "SELECT name FROM staff WHERE age > 30; DROP TABLE staff",
    "SELECT name FROM staff WHERE age > 30; SELECT 1",
    "BEGIN",
    "the name of all staff",
    "",
    ";",
    "SELECT name FROM nowhere",
    "SELECT 'a\0b",
    "SELECT '\ud800'",
    "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "SELECT zeroblob(2000000000)",
    "SELECT printf('%.*c', 2000000000, 'x')",
    "SELECT CAST(x'ff' AS TEXT)",
]


@pytest.mark.parametrize("predicted", HARMFUL)
def test_a_prediction_that_is_not_one_reading_query_does_not_match_and_leaves_nothing(
    predicted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not execution_match(STAFF, predicted, "SELECT name FROM staff WHERE age > 30")
    assert os.listdir(tmp_path) == []


LONG = "replace(replace(replace(replace('aaaaaaaaaa','a','aaaaaaaaaa'),'a','aaaaaaaaaa'),'a','aaaaaaaaaa'),'a','aaaa')"
ENDLESS = [
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT 1 FROM n) SELECT randomblob(900000) FROM n",
    "SELECT COUNT(*) FROM " + ", ".join(f"staff s{i}" for i in range(12)),
    "SELECT a.name FROM " + ", ".join(f"staff {c}" for c in "abcdefgh") + " ORDER BY a.name, h.age",
    "SELECT " + " + ".join(f"instr({LONG}, substr({LONG}, 1, 20000) || 'b')" for _ in range(30)),
    "SELECT a FROM staff" + " -- and so on" * 10_000,
]


@pytest.mark.parametrize("predicted", ENDLESS)
def test_a_query_without_end_is_stopped_in_time(predicted: str) -> None:
    begin = time.monotonic()
    scorer = SqlExecution(time_limit_seconds=0.15)
    assert not scorer.match(STAFF, predicted, "SELECT name FROM staff WHERE age > 30")
    assert time.monotonic() - begin < 2


def test_a_refused_query_leaves_the_database_usable() -> None:
    with Sandbox(STAFF) as database:
        database.fill("SELECT 1", 5, seed=0)
        before = database.query("SELECT * FROM staff")
        for harmful in HARMFUL:
            with pytest.raises(QueryError):
                database.query(harmful)
        assert database.query("SELECT * FROM staff") == before


def test_context_setup_and_gold_that_do_not_run_are_errors_of_the_data(tmp_path: Path) -> None:
    good = "SELECT name FROM staff"
    with pytest.raises(DataError, match="context is not SQL"):
        execution_match("CREATE TABEL x", good, good)
    with pytest.raises(DataError, match="setup is not SQL"):
        execution_match(STAFF, good, good, ["INSERT INTO nowhere VALUES (1)"])
    with pytest.raises(DataError, match="gold query does not run"):
        execution_match(STAFF, good, "SELECT nothing FROM nowhere")
    file = tmp_path / "made.db"
    with pytest.raises(DataError, match="context is not SQL"):
        execution_match(f"ATTACH '{file}' AS s; CREATE TABLE s.x (a)", good, good)
    assert not file.exists()


def test_constraints_of_a_table_do_not_stop_its_filling() -> None:
    context = (
        "CREATE TABLE p (id INTEGER PRIMARY KEY AUTOINCREMENT, ok BOOLEAN CHECK (ok < 500), code TEXT UNIQUE, "
        "twice INTEGER GENERATED ALWAYS AS (id * 2)); CREATE VIEW v AS SELECT * FROM p; "
        "CREATE TABLE q (p_id INTEGER REFERENCES p(id), note TEXT DEFAULT 'x'); INSERT INTO q VALUES (5, 'kept')"
    )
    assert execution_match(context, "SELECT code FROM v WHERE ok = 3", "SELECT code FROM p WHERE ok = 3")
    with Sandbox(context) as database:
        database.fill("SELECT 1", 25, seed=0)
        assert database.query("SELECT COUNT(*) FROM p").rows[0][0] > 5
        assert database.query("SELECT * FROM q").rows == [(5, "kept")]


@pytest.mark.parametrize(
    ("left", "right", "ordered", "same"),
    [
        ([(1, "a"), (2, "b")], [(2, "b"), (1, "a")], False, True),
        ([(1, "a"), (2, "b")], [(2, "b"), (1, "a")], True, False),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False, False),
        ([(1,)], [(1.0,)], False, True),
        ([(0.1 + 0.2, "x"), (0.3, "a")], [(0.3, "x"), (0.1 + 0.2, "a")], False, True),
        ([(1,)], [("1",)], False, False),
        ([(1,)], [(1.1,)], False, False),
        ([(2**62,)], [(2**62 + 1,)], False, False),
        ([(None,)], [(0,)], False, False),
        ([(None, b"x"), ("a", 1)], [("a", 1), (None, b"x")], False, True),
        ([(1, 2)], [(2, 1)], False, False),
        ([(float("inf"),)], [(float("inf"),)], False, True),
    ],
)  # fmt: skip
def test_results_are_compared_by_value(
    left: list[tuple[object, ...]], right: list[tuple[object, ...]], ordered: bool, same: bool
) -> None:
    width = len(left[0])
    assert same_result(Result(width, left), Result(width, right), ordered=ordered) is same


def test_empty_results_still_differ_in_their_columns() -> None:
    assert not same_result(Result(1, []), Result(2, []), ordered=False)
    assert same_result(Result(2, []), Result(2, []), ordered=False)
