"""The shapes of a record: which fields each has, how one is recognised, and what it says."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from leantune.data.conversations import read_guanaco, read_messages, trim_conversation
from leantune.data.examples import Example, Message
from leantune.data.fields import as_text, column_of, text_of, value_of
from leantune.data.judged import (
    classification_example,
    holds_conversations,
    preference_chat_example,
    preference_example,
)
from leantune.data.readers import Row
from leantune.errors import DataError

DETECTION_ROWS = 50
SQL_INSTRUCTION = "Write one SQL query."
# A field that every format may have besides its own.
SUBSPACES = "subspaces"


@dataclass(frozen=True)
class Format:
    """Fields of a format. `answer` is the one that is learned; None: the answers are in messages.

    Judged records need an `objective` of their own, and are rendered as those of another format.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    answer: str | None = None
    objective: str | None = None
    rendered_as: str | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)

    @property
    def needs(self) -> str:
        """The fields for a message: `instruction, output (input)`."""
        optional = f" ({', '.join(self.optional)})" if self.optional else ""
        return ", ".join(self.required) + optional


FORMATS = {
    f.name: f
    for f in (
        Format("alpaca", ("instruction", "output"), ("input",), answer="output"),
        Format("chat", ("messages",)),
        Format("prompt_completion", ("prompt", "completion"), answer="completion"),
        Format("text", ("text",)),
        Format("sql", ("question", "context", "answer"), answer="answer"),
        Format("qa", ("question", "answer"), ("context",), answer="answer"),
        Format("guanaco", ("text",)),
        Format(
            *("classification", ("text", "label"), ("text_b",)),
            objective="classification",
            rendered_as="prompt_completion",
        ),
        Format(
            *("preference", ("prompt", "chosen", "rejected")),
            objective="dpo or reward",
            rendered_as="prompt_completion",
        ),
        Format(
            *("preference_chat", ("chosen", "rejected"), ("prompt",)),
            objective="dpo or reward",
            rendered_as="chat",
        ),
    )
}


def read_examples(
    rows: Iterable[Row],
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    *,
    require_answer: bool = True,
) -> tuple[str, Iterator[Example]]:
    """The name of the format (detected if `auto`) and the examples, read as they are asked for.

    `columns` maps a field to the user's column. With `require_answer` false, rows without an
    answer are prompts to be answered. Raises `DataError` naming file, line and field.
    """
    iterator = iter(rows)
    head = list(itertools.islice(iterator, DETECTION_ROWS))
    if not head:
        raise DataError("the source holds no records")
    mapping = dict(columns or {})
    check_columns(mapping, format, head)
    name = detect_format(head, mapping) if format == "auto" else format
    if name == "preference" and holds_conversations(head[0], mapping):
        name = "preference_chat"
    check_columns(mapping, name, head)
    column = mapping.get(SUBSPACES, SUBSPACES)
    examples = (
        replace(
            to_example(row, name, mapping, require_answer=require_answer), subspaces=row.values.get(column)
        )
        for row in itertools.chain(head, iterator)
    )
    return name, examples


def rendered_as(format: str) -> str:
    """The format whose templates render these records; as a rule their own."""
    return (FORMATS[format].rendered_as if format in FORMATS else None) or format


def check_columns(columns: Mapping[str, str], format: str, head: list[Row]) -> None:
    """Refuse fields that the format does not have and columns that the rows do not have."""
    all_fields = [field for f in FORMATS.values() for field in f.fields]
    fields = FORMATS[format].fields if format in FORMATS else tuple(dict.fromkeys(all_fields))
    found = {key for row in head for key in row.values}
    for field, column in columns.items():
        if field not in (*fields, SUBSPACES):
            raise DataError(
                f"data.columns: {field!r} is not a field of the format {format}"
                f"{_did_you_mean(field, fields)}; its fields are {', '.join(fields)}"
            )
        if column not in found:
            raise DataError(
                f"data.columns: {field}: the records have no column {column!r}"
                f"{_did_you_mean(column, found)}; they have {', '.join(sorted(found))} ({head[0].where})"
            )


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), 1, 0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def detect_format(head: list[Row], columns: Mapping[str, str]) -> str:
    """The one format whose required fields the first rows have. Raises `DataError` if not exactly one."""
    found = {key for row in head for key in row.values}
    present = {field for f in FORMATS.values() for field in f.fields if column_of(field, columns, found)}
    fitting = [f for f in FORMATS.values() if present.issuperset(f.required)]
    matches = [f.name for f in fitting if f.objective is None]
    if fitting and not matches:
        raise DataError(
            f"{head[0].where}: these are {fitting[0].name} records, which are learned with an objective of "
            f"their own; set objective: {fitting[0].objective}"
        )
    if {"sql", "qa"} <= set(matches):
        matches.remove("qa" if _looks_like_sql(head, columns) else "sql")
    if {"text", "guanaco"} <= set(matches):
        column = columns.get("text", "text")
        turns = all("### Human:" in str(row.values.get(column)) for row in head)
        matches.remove("text" if turns else "guanaco")
    if len(matches) == 1:
        return matches[0]
    needs = "\n".join(f"  {f.name}: {f.needs}" for f in FORMATS.values() if f.objective is None)
    problem = f"the records fit {' and '.join(matches)}" if matches else "the records fit no known format"
    raise DataError(
        f"{head[0].where}: {problem}; set data.format, and data.columns if your columns have other names.\n"
        f"Columns found: {', '.join(sorted(found))}\n"
        f"Fields of each format (optional ones in brackets):\n{needs}"
    )


def _looks_like_sql(head: list[Row], columns: Mapping[str, str]) -> bool:
    context, answer = columns.get("context", "context"), columns.get("answer", "answer")

    def is_sql(values: Mapping[str, Any]) -> bool:
        table = "create table" in str(values.get(context)).lower()
        query = str(values.get(answer)).lstrip().lower().startswith(("select", "with ", "insert", "update"))
        return table or query

    return all(is_sql(row.values) for row in head)


def to_example(
    row: Row, format: str, columns: Mapping[str, str] | None = None, *, require_answer: bool = True
) -> Example:
    """Read one row. Raises `DataError` naming file, line and field."""
    shape, mapping = FORMATS[format], columns or {}
    if format == "chat":
        return _chat_example(row, mapping, require_answer)
    if format == "classification":
        return classification_example(row, mapping, require_answer)
    if format == "preference":
        return preference_example(row, mapping)
    if format == "preference_chat":
        return preference_chat_example(row, mapping)
    optional = set(shape.optional) | (set() if require_answer else {shape.answer})
    fields = {name: text_of(row, name, mapping, name in optional) for name in shape.fields}
    if format == "text":
        reason = None if fields["text"].strip() else "empty text"
        return Example(format, fields, (), row.where, row.index, reason)
    if format == "guanaco":
        messages = read_guanaco(fields["text"], row.where, mapping.get("text", "text"))
        return _conversation(row, format, messages, "text", require_answer)
    answer = fields[shape.answer] if shape.answer else ""
    messages = [{"role": "user", "content": user_message(format, fields)}]
    if require_answer or answer:
        messages.append({"role": "assistant", "content": answer})
    reason = "empty answer" if require_answer and not answer.strip() else None
    return Example(format, fields, tuple(messages), row.where, row.index, reason, answer_field=shape.answer)


def prompt_example(format: str, text: str) -> Example:
    """A bare prompt as an example of a format: the text takes the place of the user's part."""
    if format in ("text", "dummy"):
        return Example("text", {"text": text}, (), "prompt")
    if format in ("chat", "guanaco"):
        return Example(format, {}, ({"role": "user", "content": text},), "prompt")
    shape = FORMATS[format]
    first = "question" if "question" in shape.fields else shape.required[0]
    fields = {name: "" for name in shape.fields if name != shape.answer} | {first: text}
    message = {"role": "user", "content": user_message(format, fields)}
    return Example(format, fields, (message,), "prompt", answer_field=shape.answer)


def user_message(format: str, fields: Mapping[str, str]) -> str:
    """What the user says in a record that is not a conversation itself."""
    if format == "alpaca":
        parts = (fields["instruction"], fields["input"])
    elif format == "prompt_completion":
        return fields["prompt"]
    elif format == "sql":
        parts = (SQL_INSTRUCTION, fields["context"], fields["question"])
    else:
        parts = (fields["context"], fields["question"])
    return "\n".join(part for part in parts if part)


def _chat_example(row: Row, columns: Mapping[str, str], require_answer: bool) -> Example:
    value = value_of(row, "messages", columns)
    column = column_of("messages", columns, row.values) or "messages"
    messages = read_messages(value, row.where, column, as_text)
    return _conversation(row, "chat", messages, column, require_answer)


def _conversation(
    row: Row, format: str, messages: list[Message], field: str, require_answer: bool
) -> Example:
    wanted = "assistant" if require_answer else "user"
    if not any(message["role"] == wanted for message in messages):
        raise DataError(f"{row.where}: field {field!r} has no {wanted} turn")
    messages, reason = trim_conversation(messages, require_answer)
    return Example(format, {}, tuple(messages), row.where, row.index, reason)
