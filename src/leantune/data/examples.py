"""An example: one record after its format is understood, whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Message = dict[str, str]  # role (system, user or assistant) and content


@dataclass(frozen=True)
class Example:
    """One record as named text fields and as a conversation.

    fields: the texts of its format, "" for an optional one that is absent; messages: the same
    record as a conversation (empty for `text` records); where: file and line for the user;
    index: its number in the source, from 0; drop_reason: set if it cannot be trained on; label: the class of
    a text that has one; rejected: of a pair of answers the conversation with the worse one; subspaces: what
    the record says about the dimensions that it trains, as it was read.
    """

    format: str
    fields: Mapping[str, str]
    messages: tuple[Message, ...]
    where: str
    index: int = 0
    drop_reason: str | None = None
    answer_field: str | None = field(default=None, kw_only=True)
    subspaces: object = field(default=None, kw_only=True)
    label: str | None = field(default=None, kw_only=True)
    rejected: tuple[Message, ...] | None = field(default=None, kw_only=True)

    def sequences(self) -> list[Example]:
        """What goes through the model for this record: itself, or the chosen and the rejected answer."""
        if self.rejected is None:
            return [self]
        answers = (self.messages, self.rejected)
        return [replace(self, messages=messages, rejected=None) for messages in answers]

    @property
    def has_answer(self) -> bool:
        """Whether it ends with an answer (an assistant turn)."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    @property
    def answer(self) -> str:
        """The last answer, "" if there is none."""
        return self.messages[-1]["content"] if self.has_answer else ""

    def without_answer(self) -> Example:
        """The same record up to the point where its last answer starts."""
        if not self.has_answer:
            return self
        fields = {name: text for name, text in self.fields.items() if name != self.answer_field}
        return replace(self, fields=fields, messages=self.messages[:-1])
