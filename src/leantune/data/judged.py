"""Records that were judged: texts with a class, and pairs of a chosen and a rejected answer.

Both are rendered as other records are. A text with a class is a prompt without an answer, and a pair is two
answers to one prompt: `prompt_completion`, or `chat` if the answers are conversations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from leantune.config.objectives import label_text
from leantune.data.conversations import read_messages, trim_conversation
from leantune.data.examples import Example, Message
from leantune.data.fields import as_text, text_of, value_of
from leantune.data.readers import Row
from leantune.errors import DataError


def classification_example(row: Row, columns: Mapping[str, str], require_label: bool) -> Example:
    """`text` and, on a line of its own, `text_b`, with their `label`."""
    parts = (text_of(row, "text", columns, False), text_of(row, "text_b", columns, True))
    text = "\n".join(part for part in parts if part)
    label = _label(row, columns) if require_label else None
    reason = None if text.strip() else "empty text"
    return _prompt_completion(text, None, row, reason, label=label)


def preference_example(row: Row, columns: Mapping[str, str]) -> Example:
    """`prompt`, `chosen` and `rejected` as texts."""
    prompt, chosen, rejected = (
        text_of(row, field, columns, False) for field in ("prompt", "chosen", "rejected")
    )
    empty = "empty answer" if not chosen.strip() or not rejected.strip() else None
    reason = empty or _same(chosen, rejected)
    return _prompt_completion(prompt, chosen, row, reason, rejected=rejected)


def preference_chat_example(row: Row, columns: Mapping[str, str]) -> Example:
    """`chosen` and `rejected` as conversations; if they leave it out, `prompt` is what stands before them."""
    chosen, rejected = (_conversation(row, field, columns) for field in ("chosen", "rejected"))
    for messages in (chosen, rejected):
        if not messages or messages[-1]["role"] != "assistant":
            raise DataError(f"{row.where}: fields 'chosen' and 'rejected' must end with an assistant turn")
    if chosen[:-1] != rejected[:-1]:
        raise DataError(
            f"{row.where}: the conversations in 'chosen' and 'rejected' differ before their last turns; a "
            "pair is two answers to the same conversation"
        )
    reasons = [trim_conversation(messages, require_answer=True)[1] for messages in (chosen, rejected)]
    reason = next(filter(None, reasons), _same(chosen[-1]["content"], rejected[-1]["content"]))
    return Example("chat", {}, tuple(chosen), row.where, row.index, reason, rejected=tuple(rejected))


def answered_example(prompt: str, answer: str, format: str, where: str) -> Example:
    """One answer to a prompt as the records of a rendering (`prompt_completion` or `chat`) have it."""
    messages = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
    fields = {"prompt": prompt, "completion": answer} if format == "prompt_completion" else {}
    return Example(format, fields, messages, where, answer_field="completion")


def classes_of(labels: Iterable[str]) -> list[str]:
    """The different labels in order; whole numbers by their value."""
    found = set(labels)
    numbers = all(label.removeprefix("-").isdecimal() for label in found)
    return sorted(found, key=int) if numbers else sorted(found)


def holds_conversations(row: Row, columns: Mapping[str, str]) -> bool:
    """Whether the answers of a pair are lists of messages."""
    return not isinstance(value_of(row, "chosen", columns), str)


def _prompt_completion(
    prompt: str,
    answer: str | None,
    row: Row,
    reason: str | None,
    *,
    rejected: str | None = None,
    label: str | None = None,
) -> Example:
    def turns(text: str | None) -> tuple[Message, ...]:
        user = {"role": "user", "content": prompt}
        return (user,) if text is None else (user, {"role": "assistant", "content": text})

    return Example(
        "prompt_completion",
        {"prompt": prompt, "completion": answer or ""},
        turns(answer),
        row.where,
        row.index,
        reason,
        answer_field="completion",
        label=label,
        rejected=None if rejected is None else turns(rejected),
    )


def _label(row: Row, columns: Mapping[str, str]) -> str:
    value = value_of(row, "label", columns)
    label = label_text(value)
    if label is None:
        column = columns.get("label", "label")
        raise DataError(
            f"{row.where}: field {column!r} is {value!r:.60} ({type(value).__name__}); expected a class: a "
            "text or a whole number"
        )
    return label


def _conversation(row: Row, field: str, columns: Mapping[str, str]) -> list[Message]:
    messages = read_messages(value_of(row, field, columns), row.where, columns.get(field, field), as_text)
    if any(message["role"] == "user" for message in messages):
        return messages
    prompt = value_of(row, "prompt", columns)
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}, *messages]
    return [*read_messages(prompt, row.where, columns.get("prompt", "prompt"), as_text), *messages]


def _same(chosen: str, rejected: str) -> str | None:
    return "chosen and rejected are the same" if chosen == rejected else None
