"""The bodies of answers, as OpenAI's clients read them."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

DONE = "data: [DONE]\n\n"


class Reply(ABC):
    """The answer to one request: whole, or as chunks of a stream."""

    prefix: str  # of its id
    kind: str
    chunk_kind: str

    def __init__(self, model: str, prompt_tokens: int, includes_usage: bool) -> None:
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._includes_usage = includes_usage
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """The text in a choice of a whole answer."""

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]:
        """The text in a choice of a chunk."""

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first text."""
        return []

    def whole(self, text: str, finish: str, num_tokens: int) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choice = self._choice(self._content(text), finish)
        return {**self._head(self.kind), "choices": [choice], "usage": self._usage(num_tokens)}

    def chunks(self, text: str, finish: str | None, num_tokens: int) -> list[dict[str, Any]]:
        """What more text, and the end of the answer, add to a stream."""
        found = [self._chunk(self._choice(self._delta(text), None))] if text else []
        if finish is not None:
            found.append(self._chunk(self._choice(self._delta(""), finish)))
        if finish is not None and self._includes_usage:
            usage = self._usage(num_tokens)
            found.append({**self._head(self.chunk_kind), "choices": [], "usage": usage})
        return found

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._includes_usage else {}
        return {**self._head(self.chunk_kind), "choices": [choice], **usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _choice(self, content: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish}

    def _usage(self, num_tokens: int) -> dict[str, int]:
        prompt = self._prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": num_tokens,
            "total_tokens": prompt + num_tokens,
        }


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk(self._choice({"delta": {"role": "assistant", "content": ""}}, None))]


class TextReply(Reply):
    """Of /v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}


def event(body: Mapping[str, Any]) -> str:
    """A body as a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
