"""A template from the user's own Jinja file.

The file receives `messages`, the fields of the record (`instruction`, `input`, `question`,
`context`, `prompt`, ..., and `answer` for the answer whatever its field is called), and
`bos_token` and `eos_token`. It writes the whole record. Each answer is rendered as a
placeholder first, so that its place is known exactly; the prompt is the text before it.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from leantune.data.chat_template import special_tokens
from leantune.data.examples import Example, Message
from leantune.data.formats import FORMATS
from leantune.data.templates import Segment, Template
from leantune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Private-use characters stay what they are under filters such as upper or trim.
_PLACEHOLDER = "\ue010{}\ue011"
_FIND_PLACEHOLDER = re.compile("\ue010([0-9]+)\ue011")


class JinjaTemplate(Template):
    """Renders with a sandboxed Jinja file."""

    def __init__(
        self, path: Path, format: str, tokenizer: PreTrainedTokenizerBase, system: str | None
    ) -> None:
        super().__init__(str(path), format, tokenizer, system)
        self.path = path
        try:
            self.source = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.template: {path} cannot be read: {error}") from error
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.globals["raise_exception"] = _raise
        try:
            code = environment.compile(self.source, filename=str(path))
        except TemplateSyntaxError as error:
            raise DataError(f"{path}:{error.lineno}: not a valid Jinja template: {error.message}") from error
        self._template = environment.template_class.from_code(environment, code, environment.globals)
        self._special = sorted(special_tokens(tokenizer), key=len, reverse=True)

    def segments(self, example: Example) -> list[Segment]:
        messages = self.with_system(example.messages)
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        wanted = len(answers) + (0 if example.has_answer else 1)
        parts = _FIND_PLACEHOLDER.split(self._render(example, messages))
        numbers, texts = [int(n) for n in parts[1::2]], parts[::2]
        if numbers != list(range(wanted)):
            raise DataError(
                f"{self.path}: the template must write each answer once and in order; for the record "
                f"{example.where} with {wanted} answers it wrote {len(numbers)} "
                "(write {{ answer }}, or the content of each of the messages)"
            )
        segments = [Segment(texts[0])]
        for answer, tail in zip(answers, texts[1:], strict=False):
            segments += self._end_answer(answer, tail)
        if example.has_answer:
            segments.pop()  # nothing is learned from what follows the last answer
        return [segment for segment in segments if segment.text or segment.eos]

    def _end_answer(self, answer: str, tail: str) -> list[Segment]:
        """The answer with its end token: the one that the template writes right after it, else eos."""
        answer = answer.removesuffix(self.eos_token)
        own = next((token for token in self._special if tail.startswith(token)), None)
        if own is None:
            return [Segment(answer, supervised=True, eos=True), Segment(tail)]
        return [Segment(answer + own, supervised=True), Segment(tail.removeprefix(own))]

    def _render(self, example: Example, messages: tuple[Message, ...]) -> str:
        values = self._variables(example, messages)
        try:
            text = self._template.render(values)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            line = self._line_of(error)
            names = ", ".join(sorted(values))
            raise DataError(
                f"{self.path}:{line}: {error} (record {example.where}; the template can use {names})"
            ) from error
        if self.system is not None and self.system.strip() not in text:
            raise DataError(
                f"data.system: the template {self.path} does not write the system message (it is the first "
                "of messages, with role system); write it there, or remove the key"
            )
        return text

    def _variables(self, example: Example, messages: tuple[Message, ...]) -> dict[str, Any]:
        rendered, number = list[Message](), 0
        for message in messages:
            content = message["content"]
            if message["role"] == "assistant":
                content, number = _PLACEHOLDER.format(number), number + 1
            elif _FIND_PLACEHOLDER.search(content):
                raise DataError(f"{example.where}: the text holds the private-use character U+E010")
            rendered.append({**message, "content": content})
        if not example.has_answer:
            rendered.append({"role": "assistant", "content": _PLACEHOLDER.format(number)})
        last = rendered[-1]["content"]
        shape = FORMATS[example.format]
        fields: dict[str, Any] = {
            name: example.fields.get(name, "") for name in shape.fields if name not in ("messages", "text")
        }
        answer_names = {"answer", shape.answer or "answer"}
        return {
            **fields,
            **dict.fromkeys(answer_names, last),
            "messages": rendered,
            "bos_token": str(self.tokenizer.bos_token or ""),
            "eos_token": self.eos_token,
            "add_generation_prompt": False,
        }

    def _line_of(self, error: BaseException) -> int:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self.path)]
        return (lines[-1] or 1) if lines else 1


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
