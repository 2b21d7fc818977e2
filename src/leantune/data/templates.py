"""Templates: how an example becomes text, and which part of that text is learned.

A template renders segments. Each is tokenised by itself (see `tokens.py`), so that the
tokens of a prompt are the same in training and at generation, whatever the answer starts with.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leantune.data.examples import Example, Message
from leantune.data.formats import prompt_example, to_example
from leantune.data.readers import Row
from leantune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
TURNS = {  # the words before a user's and an assistant's text in plain conversations
    "chat": ("User:", "Assistant:"),
    "guanaco": ("### Human:", "### Assistant:"),
}


@dataclass(frozen=True)
class Segment:
    """A piece of the rendered text. `eos`: the end-of-sequence token follows, learned if the text is."""

    text: str
    supervised: bool = False
    eos: bool = False


class Template(ABC):
    """Renders the examples of one format, for training and for generation alike."""

    def __init__(
        self, name: str, format: str, tokenizer: PreTrainedTokenizerBase, system: str | None
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so that answers would never end; set eos_token "
                "in its tokenizer_config.json, or name another tokenizer with model.tokenizer"
            )
        self.name = name
        self.format = format
        self.tokenizer = tokenizer
        self.system = system
        self.eos_token = str(tokenizer.eos_token)

    @abstractmethod
    def segments(self, example: Example) -> list[Segment]:
        """The whole example; one that ends with a user's turn ends where the answer would start."""

    def prompt_segments(self, example: Example) -> list[Segment]:
        """The example up to its last answer, as training rendered it."""
        return self.segments(example.without_answer())

    def prompt(self, example: Example) -> str:
        """The text up to the last answer, byte for byte what training put before that answer."""
        segments = self.prompt_segments(example)
        return "".join(s.text + (self.eos_token if s.eos else "") for s in segments)

    def user_prompt(self, text: str) -> str:
        """The prompt of a bare user text, rendered like the records of this format."""
        return self.prompt(prompt_example(self.format, text))

    def render_prompt(
        self, item: str | Mapping[str, Any], columns: Mapping[str, str] | None = None, *, where: str = "row"
    ) -> tuple[str, str]:
        """The prompt of a bare text or a row, and the row's answer ("" if it has none)."""
        if isinstance(item, str):
            return self.user_prompt(item), ""
        row = Row(dict(item), where)
        example = to_example(row, self.format, columns, require_answer=False)
        return self.prompt(example), example.answer

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end an answer."""
        return [int(self.tokenizer.eos_token_id)]  # pyright: ignore[reportArgumentType]

    def with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Put the configured system message before a conversation that has none."""
        if self.system is None or (messages and messages[0]["role"] == "system"):
            return messages
        return ({"role": "system", "content": self.system}, *messages)

    def answer_segment(self, text: str, lead: str = "") -> Segment:
        """An answer that ends with exactly one end-of-sequence token, even if its text brings one."""
        return Segment(lead + text.removesuffix(self.eos_token), supervised=True, eos=True)


class PlainTemplate(Template):
    """The record's own text: prompt, then answer; conversations as `User: ...`, `Assistant: ...` lines.

    A system message is the first line.
    """

    def segments(self, example: Example) -> list[Segment]:
        if example.format == "text":
            return [self.answer_segment(example.fields["text"])]
        messages = self.with_system(example.messages)
        system, turns = _system_line(messages)
        if example.format in TURNS:
            return self._conversation(system, turns, TURNS[example.format])
        segments = [Segment(system + self.prompt_text(example))]
        return [*segments, self.answer_segment(example.answer)] if example.has_answer else segments

    def prompt(self, example: Example) -> str:
        return example.fields["text"] if example.format == "text" else super().prompt(example)

    def prompt_text(self, example: Example) -> str:
        """What stands before the answer of a record that is not a conversation."""
        fields = example.fields
        if example.format in ("sql", "qa"):
            context = f"###Context:\n{fields['context']}\n" if fields["context"] else ""
            return f"{context}###Question:\n{fields['question']}\n###Answer:\n"
        if example.format == "prompt_completion":
            return fields["prompt"]
        return example.messages[0]["content"] + "\n"

    def _conversation(self, system: str, turns: tuple[Message, ...], words: tuple[str, str]) -> list[Segment]:
        """`User: a\\nAssistant:` is the prompt; the space belongs to the answer, as tokenizers like it."""
        segments, text = list[Segment](), system
        for turn in turns:
            if turn["role"] == "user":
                text += f"{words[0]} {turn['content']}\n"
            else:
                segments += [Segment(text + words[1]), self.answer_segment(turn["content"], lead=" ")]
                text = "\n"
        if turns and turns[-1]["role"] != "assistant":
            segments.append(Segment(text + words[1]))
        return segments


class AlpacaTemplate(PlainTemplate):
    """Stanford Alpaca's prompt, to the letter. It holds one turn; a system message is its first line."""

    def segments(self, example: Example) -> list[Segment]:
        if example.format not in TURNS:
            return super().segments(example)
        messages = self.with_system(example.messages)
        system, turns = _system_line(messages)
        if [turn["role"] for turn in turns] not in (["user"], ["user", "assistant"]):
            raise DataError(
                f"{example.where}: the alpaca template holds one question and one answer, but the record has "
                f"{len(turns)} turns; use data.template: plain, chat or a Jinja file"
            )
        segments = [Segment(system + WITHOUT_INPUT.format(instruction=turns[0]["content"]))]
        answers = [self.answer_segment(turn["content"]) for turn in turns[1:]]
        return segments + answers

    def prompt_text(self, example: Example) -> str:
        if example.format in ("sql", "qa"):
            return super().prompt_text(example)
        fields = example.fields
        if example.format == "prompt_completion":
            return WITHOUT_INPUT.format(instruction=fields["prompt"])
        form = WITH_INPUT if fields["input"] else WITHOUT_INPUT
        return form.format(instruction=fields["instruction"], input=fields["input"])


def _system_line(messages: tuple[Message, ...]) -> tuple[str, tuple[Message, ...]]:
    if messages and messages[0]["role"] == "system":
        return messages[0]["content"] + "\n", messages[1:]
    return "", messages


def make_template(
    spec: str, format: str, tokenizer: PreTrainedTokenizerBase, *, system: str | None = None
) -> Template:
    """The template for `auto`, `chat`, `alpaca`, `plain` or the path of a Jinja file.

    Raises `DataError` if the template cannot be used with this tokenizer, format or system message.
    """
    from leantune.data.chat_template import ChatTemplate
    from leantune.data.jinja_template import JinjaTemplate

    name = resolve_template(spec, format, tokenizer)
    if format in ("text", "dummy"):
        if name != "plain":
            raise DataError(
                f"data.template: {spec}: {format} records are used as they are; set data.template: plain"
            )
        if system is not None:
            raise DataError(
                f"data.system: {format} records have no place for a system message; remove the key"
            )
    if name == "plain":
        return PlainTemplate("plain", format, tokenizer, system)
    if name == "alpaca":
        return AlpacaTemplate("alpaca", format, tokenizer, system)
    if name == "chat":
        return ChatTemplate(format, tokenizer, system)
    return JinjaTemplate(Path(name).expanduser(), format, tokenizer, system)


def resolve_template(spec: str, format: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """`chat`, `alpaca`, `plain` or a path: what `auto` means here, and a check that the rest exists."""
    if spec == "auto":
        if format in ("text", "dummy"):
            return "plain"
        if tokenizer.chat_template:
            return "chat"
        return "alpaca" if format == "alpaca" else "plain"
    if spec in ("chat", "alpaca", "plain") or Path(spec).expanduser().is_file():
        return spec
    close = difflib.get_close_matches(spec, ("auto", "chat", "alpaca", "plain"), 1, 0.6)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise DataError(
        f"data.template: {spec!r} is none of auto, chat, alpaca, plain, and no such file exists{hint}"
    )
