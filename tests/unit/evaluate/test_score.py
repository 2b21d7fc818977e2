"""Scores count what is right, and name the record and field that cannot be scored."""

from __future__ import annotations

from typing import Any

import pytest

from leantune.data.formats import read_examples
from leantune.data.readers import Row
from leantune.errors import ConfigError, DataError
from leantune.evaluate.score import Score, default_metric, judges_for
from leantune.evaluate.score import score as score_answers

SQL: dict[str, Any] = {
    "context": "CREATE TABLE t (a INTEGER, b TEXT)",
    "question": "?",
    "answer": "SELECT a FROM t",
}
CHOICE: dict[str, Any] = {
    "instruction": "Is it?\n\nAnswer format: true/false",
    "input": "",
    "output": "the correct answer is true",
    "answer": "true",
}
MATHS: dict[str, Any] = {"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}
ALPACA: dict[str, Any] = {"instruction": "Greet.", "input": "", "output": "Hello there"}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello there"}]
}


def gold(rows: list[dict[str, Any]]) -> list[str]:
    """What a model is trained to say to these records."""
    _, examples = read_examples([Row(row, "r") for row in rows], require_answer=False)
    return [example.answer for example in examples]


def score(metric: str, rows: list[dict[str, Any]], answers: list[str]) -> Score:
    return score_answers(metric, judges_for(metric, rows, gold(rows)), answers)


@pytest.mark.parametrize(
    ("row", "right", "wrong", "metric"),
    [
        (SQL, "SQL: select a from t;", "SELECT b FROM t", "sql_execution"),
        (CHOICE, "the correct answer is true", "false, not true", "choice"),
        (MATHS, "it is 2.", "#### 3", "gsm8k"),
        (ALPACA, "Hello  there ", "Hello", "exact_match"),
        (CHAT, "Hello there", "Bye", "exact_match"),
        ({"prompt": "p", "completion": "yes"}, "yes", "no", "exact_match"),
    ],
)
def test_each_shape_has_its_metric_and_its_right_answers(
    row: dict[str, Any], right: str, wrong: str, metric: str
) -> None:
    assert default_metric([row, row]) == metric
    result = score(metric, [row, row, row], [right, wrong, right])
    assert result.per_record == (True, False, True)
    assert (result.metric, result.correct, result.total) == (metric, 2, 3)
    assert result.value == pytest.approx(2 / 3)


def test_mixed_or_no_records_fall_back_to_exact_match() -> None:
    assert default_metric([SQL, ALPACA]) == "exact_match"
    assert default_metric([]) == "exact_match"


def test_exact_match_is_with_what_a_model_is_trained_to_say() -> None:
    assert score("exact_match", [CHOICE], ["the correct answer is true"]).correct == 1
    assert score("exact_match", [SQL], ["SELECT a FROM t"]).correct == 1


def test_given_options_win_and_a_gold_answer_may_be_a_sentence() -> None:
    row = {"prompt": "Which?", "options": ["red", "blue"], "completion": "the colour is blue"}
    assert score("choice", [row, row], ["Blue!", "red or blue"]).per_record == (True, False)


def test_rows_of_a_record_of_its_own_are_used_for_sql() -> None:
    row = {**SQL, "answer": "SELECT COUNT(*) FROM t", "setup": ["INSERT INTO t VALUES (1, 'x')"]}
    assert score("sql_execution", [row], ["SELECT 1"]).correct == 1


@pytest.mark.parametrize(
    ("metric", "row", "wanted", "message"),
    [
        ("sql_execution", {"answer": "SELECT 1"}, "SELECT 1", "`context` is missing"),
        ("sql_execution", {**SQL, "answer": ""}, "", "no answer to compare with"),
        ("sql_execution", {**SQL, "answer": "SELECT x FROM y"}, "", "gold query does not run"),
        ("sql_execution", {**SQL, "setup": "INSERT"}, "SELECT a FROM t", "`setup`"),
        ("choice", {**ALPACA, "answer": "x"}, "x", "no options"),
        ("choice", {**CHOICE, "answer": "maybe"}, "maybe", "none of the options true, false"),
        ("choice", {**CHOICE, "answer": ["true"]}, "true", "`answer` is \\['true'\\]; expected text"),
        ("gsm8k", {"question": "?", "answer": "none"}, "none", "has no number"),
        ("exact_match", {"instruction": "x"}, "", "no answer to compare with"),
    ],
)
def test_a_record_that_lacks_what_the_metric_needs_is_named_before_anything_is_asked(
    metric: str, row: dict[str, Any], wanted: str, message: str
) -> None:
    """Hours of answers were thrown away because the last record could not be scored."""
    good = {"sql_execution": SQL, "choice": CHOICE, "gsm8k": MATHS, "exact_match": ALPACA}[metric]
    with pytest.raises(DataError, match=rf"test\.jsonl: record 2: .*{message}.*{metric}"):
        judges_for(metric, [good, row], [*gold([good]), wanted], source="test.jsonl")


def test_the_bare_answer_of_a_record_wins_over_the_sentence_that_is_learned() -> None:
    row = {
        **ALPACA,
        "instruction": "Is it?\n\nAnswer format: yes/no",
        "output": "Not no: yes",
        "answer": "yes",
    }
    assert score("choice", [row], ["yes"]).correct == 1
    assert score("exact_match", [row], ["Not no: yes"]).correct == 1
    worked = {"prompt": "p", "completion": "so 3 of 4", "answer": 3}
    assert score("gsm8k", [worked], ["3"]).correct == 1


def test_an_unknown_metric_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean exact_match"):
        score("exactmatch", [ALPACA], ["x"])
    with pytest.raises(ConfigError, match="'bleu' is not one of exact_match, sql_execution"):
        score("bleu", [ALPACA], ["x"])


def test_records_and_answers_must_pair_up() -> None:
    with pytest.raises(DataError, match="2 records, but 1 answers"):
        score("exact_match", [ALPACA, ALPACA], ["x"])
    with pytest.raises(DataError, match="no records"):
        judges_for("exact_match", [], [])
