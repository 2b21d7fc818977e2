"""Where the turns of a tokenizer's chat template start and end."""

from __future__ import annotations

import pytest

from leantune.data.examples import Example
from leantune.data.formats import to_example
from leantune.data.readers import Row
from leantune.data.templates import Segment, make_template
from leantune.errors import DataError
from tests.fixtures import CHATML, LLAMA2, tiny_tokenizer

# Closes the conversation with eos behind the end-of-turn token.
PHI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
# Takes reasoning out of earlier turns and writes an empty one before the last.
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set content = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# The number of turns stands at the start, so that every turn changes the text before it.
UNSTABLE = "{{ messages | length }}" + CHATML
NO_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
)


def _chat(*turns: str, system: str | None = None) -> Example:
    """Turns of user and assistant in alternation."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return to_example(Row({"messages": messages}, "a.jsonl:1"), "chat", require_answer=False)


def _text(segments: list[Segment]) -> str:
    shown = [(s.text + ("*" if s.eos else ""), s.supervised) for s in segments]
    return "".join(f"[{text}]" if learned else text for text, learned in shown)


def _render(chat_template: str, *turns: str, eos: str = "<|im_end|>") -> str:
    tokenizer = tiny_tokenizer(chat_template=chat_template, eos=eos, bos="<s>")
    return _text(make_template("chat", "chat", tokenizer).segments(_chat(*turns)))


def test_every_assistant_turn_is_learned_with_its_end_token_and_no_more() -> None:
    """Only the last turn was learned, or the newline after the end token was."""
    assert _render(CHATML, "a", "b", "c", "d") == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[d<|im_end|>]"
    )


def test_eos_closes_each_turn_of_a_template_that_uses_it() -> None:
    rendered = _render(LLAMA2, "a", "b", "c", "d", eos="</s>")
    assert rendered == "<s>[INST] a [/INST][ b</s>][INST] c [/INST][ d</s>]"


def test_an_end_of_turn_token_counts_as_the_one_end() -> None:
    """A second end token (eos) was learned behind the first."""
    rendered = _render(PHI, "a", "b", eos="</s>")
    assert rendered == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]"
    tokenizer = tiny_tokenizer(chat_template=PHI, eos="</s>")
    template = make_template("chat", "chat", tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"])
    assert template.stop_token_ids == ids


def test_a_template_without_end_token_gets_eos() -> None:
    """Answers never ended."""
    assert _render(NO_END, "a", "b", "c", "d") == "user: a\nassistant: [b]\nuser: c\nassistant: [d*]"


def test_what_the_template_writes_before_an_answer_is_learned_with_it() -> None:
    assert _render(QWEN, "a", "b", "c", "d") == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\nd<|im_end|>]"
    )


def test_reasoning_that_the_template_strips_from_earlier_turns_is_not_learned_there() -> None:
    rendered = _render(QWEN, "a", "why</think>b", "c", "d")
    assert "[b<|im_end|>]" in rendered
    assert "why" not in rendered


def test_a_template_that_rewrites_earlier_text_is_refused() -> None:
    """The text before a turn in training was not the one that generation would show."""
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*rewrites earlier text"):
        _render(UNSTABLE.replace("length", "length - (1 if not add_generation_prompt else 0)"),
                "a", "b", "c", "d")  # fmt: skip


def test_a_template_whose_answer_does_not_follow_its_generation_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="does not start where the template's generation prompt ends"):
        _render(CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"), "a", "b")


def test_an_answer_that_brings_its_own_end_token_ends_once() -> None:
    assert _render(CHATML, "a", "b<|im_end|>").endswith("[b<|im_end|>]")


def test_answers_with_spaces_around_keep_them() -> None:
    assert _render(CHATML, "a ", "\n b ").endswith("a <|im_end|>\n<|im_start|>assistant\n[\n b <|im_end|>]")


def test_an_answer_that_the_template_trims_is_found() -> None:
    trimming = CHATML.replace("message['content']", "message['content'] | trim")
    assert _render(trimming, "a", " b\n", "c", " d").count("[b<|im_end|>]") == 1


def test_a_prompt_stops_before_the_last_answer_and_holds_the_earlier_ones() -> None:
    template = make_template("chat", "chat", tiny_tokenizer())
    whole = _chat("a", "b", "c", "d")
    expected = "".join(segment.text for segment in template.segments(whole)[:-1])
    assert template.prompt(whole) == expected
    assert template.prompt(_chat("a", "b", "c")) == expected


def test_a_system_message_is_put_first_unless_the_record_has_one() -> None:
    template = make_template("chat", "chat", tiny_tokenizer(), system="Be brief.")
    assert template.prompt(_chat("a", "b")).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    own = template.prompt(_chat("a", "b", system="Mine."))
    assert own.startswith("<|im_start|>system\nMine.<|im_end|>")
    assert "Be brief" not in own


@pytest.mark.parametrize("chat_template", [NO_SYSTEM, REFUSES_SYSTEM])
def test_a_system_message_that_the_template_cannot_write_is_refused(chat_template: str) -> None:
    """Some templates drop it without a word."""
    with pytest.raises(DataError, match="system"):
        make_template("chat", "chat", tiny_tokenizer(chat_template=chat_template), system="Be brief.")


def test_a_record_that_the_template_refuses_is_named() -> None:
    template = make_template("chat", "chat", tiny_tokenizer(chat_template=REFUSES_SYSTEM))
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*no system role"):
        template.segments(_chat("a", "b", system="Mine."))


def test_a_conversation_may_be_rewritten_by_the_template() -> None:
    """The answer before was looked for in the prompt, where its reasoning is not any more."""
    tokenizer = tiny_tokenizer(chat_template=QWEN)
    template = make_template("chat", "chat", tokenizer)
    said = [*_chat("a", "why</think>b", "c").messages]
    expected = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert template.conversation_prompt(said) == expected
