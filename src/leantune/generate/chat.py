"""A conversation with a model in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import Any

from leantune.data.examples import Message
from leantune.errors import LeantuneError
from leantune.generate.decode import Sampling, stream
from leantune.generate.edits import AS_TRAINED, EditSettings
from leantune.methods.protocol import Attached

Render = Callable[[list[Message]], str]

HELP = "/reset starts again, /system TEXT sets the system message, /exit leaves"


class ChatSession:
    """The messages so far, and the model that answers them.

    `render` turns messages into the prompt of the next answer, e.g. `Template.conversation_prompt`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        sampling: Sampling,
        render: Render,
        *,
        attached: Attached | None = None,
        system: str | None = None,
        stop_token_ids: Iterable[int] = (),
        edits: EditSettings = AS_TRAINED,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.attached = attached
        self.stop_token_ids = tuple(stop_token_ids)
        self.edits = edits
        self.messages: list[Message] = []
        self._render = render
        self.restart(system)

    @property
    def system(self) -> str | None:
        """The system message, if there is one."""
        first = self.messages[0] if self.messages else None
        return first["content"] if first and first["role"] == "system" else None

    def restart(self, system: str | None) -> None:
        """Forget the conversation; the next one has this system message (None: has none)."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> Generator[str, None, None]:
        """Yield the answer to `text` as it comes.

        An answer that is cut short is kept as far as it came; without any answer the question
        is not kept either.
        """
        question = {"role": "user", "content": text}
        prompt = self._render([*self.messages, question])
        answer, finished = "", False
        try:
            # A stream that is left half-way must stop its thread now, not when it is collected.
            with closing(self._stream(prompt)) as pieces:
                for piece in pieces:
                    answer += piece
                    yield piece
            finished = True
        finally:
            if answer or finished:
                self.messages += [question, {"role": "assistant", "content": answer}]

    def _stream(self, prompt: str) -> Generator[str, None, None]:
        return stream(
            self.model,
            self.tokenizer,
            prompt,
            self.sampling,
            self.attached,
            stop_token_ids=self.stop_token_ids,
            edits=self.edits,
        )


def run_chat(session: ChatSession, read_line: Callable[[], str], write: Callable[[str], None]) -> None:
    """Read lines, write answers, until `/exit`, end of input, or Ctrl-C at the prompt.

    `read_line` raises EOFError at the end, as `input` does. Ctrl-C during an answer stops only
    that answer.
    """
    write(HELP + "\n")
    while True:
        try:
            line = read_line().strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        if line == "/exit":
            return
        if line.startswith("/"):
            write(_command(session, line) + "\n")
        elif line:
            _answer(session, line, write)


def _command(session: ChatSession, line: str) -> str:
    """Obey one `/command`; returns what to tell the user."""
    name, _, rest = line.partition(" ")
    if name == "/reset" and not rest:
        session.restart(session.system)
        return "The conversation starts again."
    if name == "/system":
        session.restart(rest.strip() or None)
        return f"The conversation starts again, {'with this' if rest else 'without a'} system message."
    return f"{line!r} is not a command: {HELP}."


def _answer(session: ChatSession, line: str, write: Callable[[str], None]) -> None:
    try:
        with closing(session.say(line)) as pieces:
            for piece in pieces:
                write(piece)
    except KeyboardInterrupt:
        write(" [stopped]")
    except LeantuneError as error:
        write(f"{error}\n/reset starts again.")
    write("\n")
