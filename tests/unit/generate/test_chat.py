"""A conversation keeps its turns, obeys its commands, and ends politely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leantune.data.templates import make_template
from leantune.generate.chat import ChatSession, run_chat
from leantune.generate.decode import Sampling, generate
from tests.fixtures import tiny_llama, tiny_tokenizer

SHORT = Sampling(max_new_tokens=5)


def session(**options: Any) -> ChatSession:
    tokenizer = options.pop("tokenizer", None) or tiny_tokenizer()
    template = make_template("chat", "chat", tokenizer)
    return ChatSession(tiny_llama(), tokenizer, SHORT, template.conversation_prompt, **options)


def lines(*texts: str | type[BaseException]) -> Callable[[], str]:
    """A terminal that types these lines; a class is raised instead."""
    left = list(texts)

    def read() -> str:
        line = left.pop(0)
        if isinstance(line, str):
            return line
        raise line

    return read


def test_an_answer_is_that_of_the_rendered_conversation() -> None:
    chat = session(system="Be brief.")
    first = "".join(chat.say("the man"))
    prompt = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nthe man<|im_end|>\n"
        f"<|im_start|>assistant\n{first.strip()}<|im_end|>\n"
        "<|im_start|>user\nthe woman<|im_end|>\n<|im_start|>assistant\n"
    )
    second = "".join(chat.say("the woman"))
    assert second == generate(chat.model, chat.tokenizer, [prompt], SHORT)[0]
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_the_prompt_is_what_render_makes_of_the_messages() -> None:
    tokenizer = tiny_tokenizer(chat_template=None)
    seen: list[list[dict[str, str]]] = []

    def render(messages: list[dict[str, str]]) -> str:
        seen.append(messages)
        return "Q: " + messages[-1]["content"]

    chat = ChatSession(tiny_llama(), tokenizer, SHORT, render)
    answer = "".join(chat.say("the"))
    assert answer == generate(chat.model, tokenizer, ["Q: the"], SHORT)[0]
    assert seen == [[{"role": "user", "content": "the"}]]


def test_commands_change_the_conversation_and_are_not_sent_to_the_model() -> None:
    chat = session()
    shown: list[str] = []
    run_chat(
        chat,
        lines("the man", "/reset", "/system Be brief.", "", "/help", "/exit", "never read"),
        shown.append,
    )
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert "'/help' is not a command" in "".join(shown)
    run_chat(chat, lines("hello", "/reset", "/exit"), shown.append)
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    run_chat(chat, lines("/system", "/exit"), shown.append)
    assert chat.messages == []


@pytest.mark.parametrize("leaving", [EOFError, KeyboardInterrupt])
def test_end_of_input_and_ctrl_c_leave_with_a_newline(leaving: type[BaseException]) -> None:
    shown: list[str] = []
    run_chat(session(), lines(leaving), shown.append)
    assert shown[-1] == "\n"


def test_ctrl_c_during_an_answer_keeps_what_was_said_and_goes_on() -> None:
    chat = session()
    shown: list[str] = []

    def write(text: str) -> None:
        shown.append(text)
        if len(shown) == 2:  # the first piece of the answer
            raise KeyboardInterrupt

    run_chat(chat, lines("the man", "/exit"), write)
    assert shown[2:] == [" [stopped]", "\n"]
    assert chat.messages[-1] == {"role": "assistant", "content": shown[1]}


def test_a_question_too_long_is_refused_and_forgotten() -> None:
    chat = session()
    shown: list[str] = []
    run_chat(chat, lines("x" * 600, "the", "/exit"), shown.append)
    assert "512 positions" in "".join(shown)
    assert next(m["content"] for m in chat.messages) == "the"


def test_a_template_that_refuses_a_system_message_says_so_and_the_chat_goes_on() -> None:
    refusing = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system messages') }}"
        "{% endif %}{{ m['content'] }}{% endfor %}"
    )
    chat = session(tokenizer=tiny_tokenizer(chat_template=refusing), system="Be brief.")
    shown: list[str] = []
    run_chat(chat, lines("the", "/system", "the", "/exit"), shown.append)
    assert "no system messages" in "".join(shown)
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
