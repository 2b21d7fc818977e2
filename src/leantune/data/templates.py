"""Templates: how an example becomes text, and which part of that text is learned.

A template renders segments. Each is tokenised by itself (see `tokens.py`), so that the
tokens of a prompt are the same in training and at generation, whatever the answer starts with.
"""

from __future__ import annotations

import copy
import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from leantune.data.examples import Example, Message
from leantune.data.formats import prompt_example, rendered_as, user_message
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
    """A piece of the rendered text. `eos`: the end-of-sequence token follows, learned if the text is.

    `marked`: it stood between the markers of a marked span (see `markers.py`).
    """

    text: str
    supervised: bool = False
    eos: bool = False
    marked: bool = False


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

    def prompt(self, example: Example) -> str:
        """The text up to the last answer, byte for byte what training put before that answer."""
        segments = self.segments(example.without_answer())
        return "".join(s.text + (self.eos_token if s.eos else "") for s in segments)

    def user_prompt(self, text: str) -> str:
        """The prompt of a bare user text, rendered like the records of this format."""
        return self.prompt(prompt_example(self.format, text))

    def conversation_prompt(self, messages: Sequence[Message]) -> str:
        """The prompt of the next answer in a conversation that ends with a user's turn.

        The system message is the conversation's own, or none. Raises `DataError` if the template
        cannot write so many turns, or writes no system message.
        """
        as_it_is = copy.copy(self)
        as_it_is.system = None
        turns = tuple(self._as_in_records(message) for message in messages)
        last = prompt_example(self.format, messages[-1]["content"])
        text = as_it_is.prompt(replace(last, messages=turns, where="the conversation"))
        if any(m["role"] == "system" and m["content"].strip() not in text for m in messages):
            raise DataError(f"the template {self.name} does not write the system message; leave it out")
        return text

    def _as_in_records(self, message: Message) -> Message:
        """A user's words with what this format puts around them; an answer without the template's space."""
        if message["role"] == "assistant":
            return {**message, "content": message["content"].strip()}
        if message["role"] == "system":
            return message
        return next(iter(prompt_example(self.format, message["content"]).messages), message)

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
        system, turns = _system_line(self.with_system(example.messages))
        if example.format in TURNS:
            return self._conversation(system, turns, TURNS[example.format])
        self.check_one_turn(example, turns)
        segments = [Segment(system + self.prompt_text(example))]
        return [*segments, self.answer_segment(example.answer)] if example.has_answer else segments

    def prompt(self, example: Example) -> str:
        if example.format != "text":
            return super().prompt(example)
        self.check_one_turn(example, example.messages or ({"role": "user"},))
        return example.fields["text"]

    def check_one_turn(self, example: Example, turns: Sequence[Message]) -> None:
        """Raise `DataError` for more than one question with one answer."""
        if [turn["role"] for turn in turns] not in (["user"], ["user", "assistant"]):
            raise DataError(
                f"{example.where}: the {self.name} template holds one question and one answer of "
                f"{example.format} records, but there are {len(turns)} turns; use data.template: "
                f"{'plain, ' if example.format in TURNS else ''}chat or a Jinja file that writes messages"
            )

    def prompt_text(self, example: Example) -> str:
        """What stands before the answer of a record that is not a conversation."""
        fields = example.fields
        if example.format in ("sql", "qa"):
            context = f"###Context:\n{fields['context']}\n" if fields["context"] else ""
            return f"{context}###Question:\n{fields['question']}\n###Answer:\n"
        if example.format == "prompt_completion":
            return fields["prompt"]
        return user_message(example.format, fields) + "\n"

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
        system, turns = _system_line(self.with_system(example.messages))
        self.check_one_turn(example, turns)
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

    format = rendered_as(format)
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
