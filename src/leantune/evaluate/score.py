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

_TRAINED = ("output", "completion", "answer")  # what a model is trained to say
_SHORT = ("answer", "output", "completion")  # the bare answer comes first


@dataclass(frozen=True)
class Score:
    """How many answers are right; `value` is the share (0 to 1)."""

    metric: str
    value: float
    correct: int
    total: int
    per_record: tuple[bool, ...]


def score(
    metric: str, rows: Sequence[Mapping[str, Any]], answers: Sequence[str], *, source: str | None = None
) -> Score:
    """Score one answer per record; the gold answer is the record's `answer`, `output` or `completion`.

    `source` names the file of the records in messages. Raises `ConfigError` for an unknown
    metric, `DataError` for a record that lacks what the metric needs.
    """
    judge = _JUDGES[known_metric(metric)]
    where = f"{source}: " if source else ""
    if not rows:
        raise DataError(f"{where}there are no records to score")
    if len(rows) != len(answers):
        raise DataError(f"{where}{len(rows)} records, but {len(answers)} answers; expected one for each")
    right: list[bool] = []
    for number, (row, answer) in enumerate(zip(rows, answers, strict=True), start=1):
        try:
            right.append(judge(row, answer))
        except DataError as error:
            raise DataError(f"{where}record {number}: {error}; needed by the metric {metric}") from error
    return Score(metric, sum(right) / len(right), sum(right), len(right), tuple(right))


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


def _exact(row: Mapping[str, Any], answer: str) -> bool:
    return exact_match(answer, _gold(row, _TRAINED))


def _sql(row: Mapping[str, Any], answer: str) -> bool:
    setup = row.get("setup")
    if setup is not None and not (isinstance(setup, list) and all(isinstance(s, str) for s in setup)):
        raise DataError(f"field `setup` is {setup!r:.60}; expected a list of INSERT statements")
    context = _text(row, "context")
    return SqlExecution().match(context, extract_sql(answer), _gold(row, _SHORT), setup)


def _choice(row: Mapping[str, Any], answer: str) -> bool:
    options = _options(row)
    if not options:
        raise DataError(
            "no options; expected a field `options` (a list), or `Answer format: a/b/c` in the instruction"
        )
    gold = extract_choice(_gold(row, _SHORT), options)
    if gold is None:
        raise DataError(f"the answer {_gold(row, _SHORT)!r} is none of the options {', '.join(options)}")
    return extract_choice(answer, options) == gold


def _number(row: Mapping[str, Any], answer: str) -> bool:
    gold = extract_number(_gold(row, _SHORT))
    if gold is None:
        raise DataError(f"the answer {_gold(row, _SHORT)[-60:]!r} has no number")
    return extract_number(answer) == gold


_JUDGES: dict[Metric, Callable[[Mapping[str, Any], str], bool]] = {
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


def _gold(row: Mapping[str, Any], fields: Sequence[str]) -> str:
    """The gold answer: the first of these fields, or the last assistant message of a conversation."""
    for field in fields:
        if row.get(field) is not None:
            return _text(row, field)
    messages = row.get("messages")
    if isinstance(messages, list):
        said = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "assistant"]
        if said and isinstance(said[-1], str):
            return said[-1]
    raise DataError(f"field `{fields[0]}` is missing (or {', '.join(f'`{f}`' for f in fields[1:])})")


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field)
    if value is None:
        raise DataError(f"field `{field}` is missing")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(f"field `{field}` is {value!r:.60}; expected text")
    return value
