"""Reads conversations: OpenAI's role/content, ShareGPT's from/value, and Guanaco's text turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leantune.data.examples import Message
from leantune.errors import DataError

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_GUANACO_TURN = re.compile(r"###\s*(Human|Assistant):")

AsText = Callable[[Any, str, str], str]  # value, file and line, field -> text, or a DataError


def read_messages(value: Any, where: str, field: str, as_text: AsText) -> list[Message]:
    """The messages of a `messages` or `conversations` field, roles mapped to user and assistant."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise DataError(
            f"{where}: field {field!r} must be a list of messages, found {type(value).__name__}; "
            f'a message is {{"role": "user", "content": "..."}} or {{"from": "human", "value": "..."}}'
        )
    messages = [_read_message(item, where, f"{field}[{i}]", as_text) for i, item in enumerate(value)]
    late = [i for i, message in enumerate(messages) if message["role"] == "system" and i > 0]
    if late:
        raise DataError(f"{where}: field '{field}[{late[0]}]': a system message must come first")
    return messages


def _read_message(item: Any, where: str, field: str, as_text: AsText) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"{where}: field {field!r} must be an object with role and content")
    role_key, text_key = ("from", "value") if "from" in item and "role" not in item else ("role", "content")
    for key in (role_key, text_key):
        if key not in item:
            raise DataError(
                f"{where}: field '{field}.{key}' is missing (found {', '.join(map(str, item)) or 'nothing'})"
            )
    role = item[role_key]
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise DataError(
            f"{where}: field '{field}.{role_key}' is {role!r}; roles are {', '.join(ROLES)} "
            "(tool turns cannot be trained)"
        )
    return {
        "role": ROLES[role.lower()],
        "content": as_text(item[text_key], where, f"{field}.{text_key}"),
    }


def read_guanaco(text: str, where: str, field: str) -> list[Message]:
    """The turns of `### Human: ...### Assistant: ...`, texts stripped."""
    start, *parts = _GUANACO_TURN.split(text)
    if not parts or start.strip():
        raise DataError(
            f"{where}: field {field!r} must start with '### Human:' and hold '### Assistant:' turns, "
            f"found {text[:40]!r}"
        )
    return [
        {"role": ROLES[role.lower()], "content": content.strip()}
        for role, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def trim_conversation(messages: list[Message], require_answer: bool) -> tuple[list[Message], str | None]:
    """Cut user turns that nobody answers, and say why a conversation cannot be trained on, if so.

    With `require_answer` false the last user turn stays: it is the prompt to be answered.
    """
    if require_answer:
        while messages and messages[-1]["role"] != "assistant":
            messages = messages[:-1]
    turns = [message for message in messages if message["role"] != "system"]
    if turns and turns[0]["role"] == "assistant":
        return messages, "starts with an assistant turn"
    if any(turn["role"] == "assistant" and not turn["content"].strip() for turn in turns):
        return messages, "empty answer"
    return messages, None
