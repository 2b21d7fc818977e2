"""The tokens of an answer as text that never has to be taken back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

_HALF = "\ufffd"  # how a tokenizer decodes half a character


class TextPieces:
    """Turns the tokens of one answer into pieces of text as they come.

    Half a character waits for its rest, and so does what may be the beginning of a stop string.
    `tokens` are those of the answer, `stopped` says that a stop token or a stop string has come; the text
    ends before it.
    """

    def __init__(
        self, tokenizer: Any, stop_token_ids: Collection[int], stop_strings: Sequence[str] = ()
    ) -> None:
        self.tokens: list[int] = []
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._stop_strings = stop_strings
        self._sent = ""
        self._end: int | None = None

    def put(self, token: int) -> str:
        """Take the next token; returns the text that is certain now, often none."""
        if self.stopped or token in self._stop_token_ids:
            self.stopped = True
            return ""
        self.tokens.append(token)
        text = answer_text(self._tokenizer, self.tokens)
        found = [at for stop in self._stop_strings if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._end = True, min(found)
            return self._new(text[: self._end])
        if text.endswith(_HALF) or not text.startswith(self._sent):
            return ""
        return self._new(text[: self._certain(text)])

    def end(self) -> str:
        """The rest, once no token follows."""
        return self._new(answer_text(self._tokenizer, self.tokens)[: self._end])

    def _certain(self, text: str) -> int:
        """How much of the text cannot be the beginning of a stop string."""
        held = (
            size
            for stop in self._stop_strings
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        )
        return len(text) - max(held, default=0)

    def _new(self, text: str) -> str:
        piece = text[len(self._sent) :]
        self._sent += piece
        return piece


def answer_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of an answer, without special tokens."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
