"""Scores of answers against the records they answer."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from leantune.errors import ConfigError, DataError
from leantune.evaluate.choice import extract_choice, options_of
from leantune.evaluate.exact import exact_match
from leantune.evaluate.gsm8k import extract_number
from leantune.evaluate.sql import SqlExecution, extract_sql

Metric = Literal["exact_match", "sql_execution", "choice", "gsm8k"]
METRICS: tuple[str, ...] = get_args(Metric)

# Judges one answer; what it needs of the record has been checked.
Judge = Callable[[str], bool]


@dataclass(frozen=True)
class Score:
    """How many answers are right; `value` is the share (0 to 1)."""

    metric: str
    value: float
    correct: int
    total: int
    per_record: tuple[bool, ...]


def judges_for(
    metric: str, rows: Sequence[Mapping[str, Any]], gold: Sequence[str], *, source: str | None = None
) -> list[Judge]:
    """A judge for each record, before there are any answers.

    gold: what a model is trained to say to each record. A record's own `answer` is taken for the
    bare answer, except by exact_match. `source` names the file of the records in messages. Raises
    `ConfigError` for an unknown metric, `DataError` for a record that lacks what the metric needs.
    """
    make = _METRICS[known_metric(metric)]
    where = f"{source}: " if source else ""
    if not rows:
        raise DataError(f"{where}there are no records to score")
    judges: list[Judge] = []
    for number, (row, wanted) in enumerate(zip(rows, gold, strict=True), start=1):
        try:
            judges.append(make(row, wanted))
        except DataError as error:
            raise DataError(f"{where}record {number}: {error}; needed by the metric {metric}") from error
    return judges


def score(metric: str, judges: Sequence[Judge], answers: Sequence[str]) -> Score:
    """Score one answer per record; raises `DataError` if their numbers differ."""
    if len(judges) != len(answers):
        raise DataError(f"{len(judges)} records, but {len(answers)} answers; expected one for each")
    right = tuple(judge(answer) for judge, answer in zip(judges, answers, strict=True))
    return Score(metric, sum(right) / len(right), sum(right), len(right), right)


def known_metric(name: str) -> Metric:
    """The metric of that name; raises `ConfigError` with the nearest one if there is none."""
    if name in METRICS:
        return name  # pyright: ignore[reportReturnType]
    close = difflib.get_close_matches(name, METRICS, 1, 0.4)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"metric: {name!r} is not one of {', '.join(METRICS)}{hint}")


def default_metric(rows: Sequence[Mapping[str, Any]]) -> Metric:
    """The metric that fits the shape of all these records; exact_match if no other does."""
    shapes: list[tuple[Metric, Callable[[Mapping[str, Any]], bool]]] = [
        ("sql_execution", lambda row: "create table" in str(row.get("context", "")).lower()),
        ("gsm8k", lambda row: "####" in str(row.get("answer", ""))),
        ("choice", lambda row: len(_options(row)) > 1),
    ]
    for metric, fits in shapes:
        if rows and all(fits(row) for row in rows):
            return metric
    return "exact_match"


def _exact(row: Mapping[str, Any], gold: str) -> Judge:
    del row
    wanted = _some(gold)
    return lambda answer: exact_match(answer, wanted)


def _sql(row: Mapping[str, Any], gold: str) -> Judge:
    setup = row.get("setup")
    if setup is not None and not (isinstance(setup, list) and all(isinstance(s, str) for s in setup)):
        raise DataError(f"field `setup` is {setup!r:.60}; expected a list of INSERT statements")
    context, wanted = _text(row, "context"), _bare(row, gold)
    SqlExecution(num_databases=1).match(context, wanted, wanted, setup)  # raises if the gold query fails
    return lambda answer: SqlExecution().match(context, extract_sql(answer), wanted, setup)


def _choice(row: Mapping[str, Any], gold: str) -> Judge:
    options, bare = _options(row), _bare(row, gold)
    if not options:
        raise DataError(
            "no options; expected a field `options` (a list), or `Answer format: a/b/c` in the instruction"
        )
    wanted = extract_choice(bare, options)
    if wanted is None:
        raise DataError(f"the answer {bare!r} is none of the options {', '.join(options)}")
    return lambda answer: extract_choice(answer, options) == wanted


def _number(row: Mapping[str, Any], gold: str) -> Judge:
    bare = _bare(row, gold)
    wanted = extract_number(bare)
    if wanted is None:
        raise DataError(f"the answer {bare[-60:]!r} has no number")
    return lambda answer: extract_number(answer) == wanted


_METRICS: dict[Metric, Callable[[Mapping[str, Any], str], Judge]] = {
    "exact_match": _exact,
    "sql_execution": _sql,
    "choice": _choice,
    "gsm8k": _number,
}


def _options(row: Mapping[str, Any]) -> list[str]:
    given = row.get("options")
    if isinstance(given, list):
        return [str(option) for option in given]
    asked = (row.get(field) for field in ("instruction", "question", "prompt"))
    return next((options for text in asked if isinstance(text, str) and (options := options_of(text))), [])


def _bare(row: Mapping[str, Any], gold: str) -> str:
    """The record's own short answer if it has one beside the text that is learned."""
    return _some(gold if row.get("answer") in (None, "") else _text(row, "answer"))


def _some(gold: str) -> str:
    if not gold.strip():
        raise DataError("it has no answer to compare with")
    return gold


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    if value is None:
        raise DataError(f"field `{field}` is missing")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(f"field `{field}` is {value!r:.60}; expected text")
    return value
