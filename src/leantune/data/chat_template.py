"""The tokenizer's own chat template: where its turns start and end, found by rendering.

The prompt of each assistant turn is the conversation before it, rendered with the generation
prompt. What the template adds after a prompt is that turn: its text and its end-of-turn token
are learned; what follows (a newline, the next header) is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from leantune.data.examples import Example, Message
from leantune.data.templates import Segment, Template
from leantune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Words that no template transforms, for the rendering that shows how the template writes a turn.
_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "quaxone"},
    {"role": "assistant", "content": "zebtwo"},
    {"role": "user", "content": "quaxthree"},
    {"role": "assistant", "content": "zebfour"},
)


class ChatTemplate(Template):
    """Renders with `tokenizer.apply_chat_template`."""

    def __init__(self, format: str, tokenizer: PreTrainedTokenizerBase, system: str | None) -> None:
        super().__init__("chat", format, tokenizer, system)
        if not tokenizer.chat_template:
            raise DataError(
                "data.template: chat: the tokenizer has no chat template; use alpaca, plain or a Jinja file, "
                "or name another tokenizer with model.tokenizer"
            )
        self.lead_middle, self.lead_last, self.end_of_turn = self._probe()
        if system is not None:
            self._check_system(system)

    @property
    def stop_token_ids(self) -> list[int]:
        """The end-of-sequence token, and the end-of-turn token if that is another."""
        ids = super().stop_token_ids
        marker = next((t for t in special_tokens(self.tokenizer) if t and self.end_of_turn.endswith(t)), None)
        if marker is not None:
            ids.append(int(self.tokenizer.convert_tokens_to_ids(marker)))  # pyright: ignore[reportArgumentType]
        return list(dict.fromkeys(ids))

    def segments(self, example: Example) -> list[Segment]:
        messages = [self._without_end(message) for message in self.with_system(example.messages)]
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        prompts = [self._render(messages[:i], True, example.where) for i in turns]
        last = self._render(messages, not example.has_answer, example.where)
        if not turns:
            return [Segment(last)]
        segments = [Segment(prompts[0])]
        for number, turn in enumerate(turns):
            following = prompts[number + 1] if number + 1 < len(turns) else last
            if not following.startswith(prompts[number]):
                raise DataError(
                    f"{example.where}: the tokenizer's chat template rewrites earlier text when a turn is "
                    f"added (assistant turn {number + 1}), so that what the model would see is not what it "
                    "would learn from; use single-turn records, or a Jinja file as data.template"
                )
            region = following[len(prompts[number]) :]
            is_last = number + 1 == len(turns) and example.has_answer
            segments += self._split_turn(region, messages[turn]["content"], is_last, example.where)
        return [segment for segment in segments if segment.text or segment.eos]

    def prompt(self, example: Example) -> str:
        # Of what a template rewrites in earlier turns nothing is learned here, so it may.
        messages = self.with_system(example.without_answer().messages)
        return self._render([self._without_end(message) for message in messages], True, example.where)

    def _split_turn(self, region: str, content: str, is_last: bool, where: str) -> list[Segment]:
        """The learned part of a turn, and the rest of the text up to the next turn (none if last)."""
        lead = self.lead_last if is_last else self.lead_middle
        for text in (content, content.rstrip(), content.lstrip(), content.strip()):
            if region.startswith(lead + text + self.end_of_turn):
                end = len(lead + text + self.end_of_turn)
                break
        else:
            # The template rewrites the text of a turn (Qwen3 takes reasoning out of earlier ones).
            found = region.find(self.end_of_turn) if self.end_of_turn else -1
            if found < 0:
                raise DataError(
                    f"{where}: the chat template changes the text of the answer {content[:40]!r}, so that "
                    "its end cannot be found; use a Jinja file as data.template"
                )
            end = found + len(self.end_of_turn)
        if is_last:
            return [Segment(region[:end], supervised=True, eos=not self.end_of_turn)]
        return [Segment(region[:end], supervised=True), Segment(region[end:])]

    def _without_end(self, message: Message) -> Message:
        """An answer whose text brings the end token itself would end twice."""
        if message["role"] != "assistant":
            return message
        content = message["content"].removesuffix(self.eos_token)
        if self.end_of_turn:
            content = content.removesuffix(self.end_of_turn)
        return {"role": "assistant", "content": content}

    def _render(self, messages: Sequence[Message], generation: bool, where: str) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"{where}: the tokenizer's chat template refuses the conversation: {error}"
            ) from error
        return str(text)

    def _probe(self) -> tuple[str, str, str]:
        """What the template writes before a middle and a last answer, and its end-of-turn marker."""
        where = "data.template: chat"
        prompts = [self._render(_PROBE[:i], True, where) for i in (1, 3)]
        wholes = [self._render(_PROBE[:i], False, where) for i in (2, 4)]
        first, last = _PROBE[1]["content"], _PROBE[3]["content"]
        if not wholes[0].startswith(prompts[0]) or first not in wholes[0][len(prompts[0]) :]:
            raise DataError(
                f"{where}: an answer does not start where the template's generation prompt ends "
                f"({prompts[0][-40:]!r}); use a Jinja file as data.template"
            )
        lead, _, tail = wholes[0][len(prompts[0]) :].partition(first)
        if not (prompts[1].startswith(prompts[0]) and wholes[1].startswith(prompts[1])):
            return lead, lead, self._first_special(tail)
        middle, _, middle_tail = prompts[1][len(prompts[0]) :].partition(first)
        final, _, last_tail = wholes[1][len(prompts[1]) :].partition(last)
        return middle, final, self._first_special(_common_start(middle_tail, last_tail))

    def _first_special(self, tail: str) -> str:
        """The tail up to its first special token, "" if it has none."""
        ends = [(tail.index(token), -len(token)) for token in special_tokens(self.tokenizer) if token in tail]
        if not ends:
            return ""
        start, negative_length = min(ends)
        return tail[: start - negative_length]

    def _check_system(self, system: str) -> None:
        """Some templates leave a system message out without a word."""
        messages = ({"role": "system", "content": system}, *_PROBE[:1])
        if system.strip() not in self._render(messages, True, "data.system"):
            raise DataError(
                "data.system: the tokenizer's chat template writes no system message; remove the key, or put "
                "the text into the user messages"
            )


def _common_start(first: str, second: str) -> str:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(character for character, _ in same)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The texts of all special tokens, named ones (eos) and added ones."""
    added = {str(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special}
    return added | {str(tokenizer.eos_token)}
