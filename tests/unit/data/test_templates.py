"""The wording of the built-in templates, what auto chooses, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from leantune.data.examples import Example
from leantune.data.formats import to_example
from leantune.data.readers import Row
from leantune.data.templates import Segment, make_template, resolve_template
from leantune.errors import DataError
from tests.fixtures import tiny_tokenizer

TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def _example(format: str, **values: Any) -> Example:
    return to_example(Row(values, "a.jsonl:1"), format)


def _text(segments: list[Segment]) -> str:
    """Learned segments in brackets, with * for the end-of-sequence token."""
    shown = [(s.text + ("*" if s.eos else ""), s.supervised) for s in segments]
    return "".join(f"[{text}]" if learned else text for text, learned in shown)


def test_alpaca_prompts_are_stanfords_to_the_letter() -> None:
    """Another wording is another prompt than models were trained on."""
    template = make_template("alpaca", "alpaca", tiny_tokenizer())
    with_input = template.segments(_example("alpaca", instruction="Add.", input="1 2", output="3"))
    assert _text(with_input) == (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:[3*]"
    )
    without = template.segments(_example("alpaca", instruction="Say {x}.", input="", output="3"))
    assert _text(without) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes "
        "the request.\n\n### Instruction:\nSay {x}.\n\n### Response:[3*]"
    )


@pytest.mark.parametrize(
    ("format", "values", "expected"),
    [
        ("sql", {"question": "q", "context": "c", "answer": "a"},
         "###Context:\nc\n###Question:\nq\n###Answer:\n[a*]"),
        ("qa", {"question": "q", "answer": "a"}, "###Question:\nq\n###Answer:\n[a*]"),
        ("prompt_completion", {"prompt": "p ", "completion": " a"}, "p [ a*]"),
        ("alpaca", {"instruction": "i", "input": "j", "output": "a"}, "i\nj\n[a*]"),
        ("text", {"text": "t"}, "[t*]"),
        ("chat", {"messages": TURNS}, "User: a\nAssistant:[ b*]\nUser: c\nAssistant:[ d*]"),
        ("guanaco", {"text": "### Human: a### Assistant: b"}, "### Human: a\n### Assistant:[ b*]"),
    ],
)  # fmt: skip
def test_plain_renders_each_format(format: str, values: dict[str, Any], expected: str) -> None:
    template = make_template("plain", format, tiny_tokenizer())
    assert _text(template.segments(_example(format, **values))) == expected


@pytest.mark.parametrize(
    ("format", "with_chat", "without"),
    [
        ("alpaca", "chat", "alpaca"),
        ("sql", "chat", "plain"),
        ("guanaco", "chat", "plain"),
        ("prompt_completion", "chat", "plain"),
        ("text", "plain", "plain"),
    ],
)
def test_auto(format: str, with_chat: str, without: str) -> None:
    assert resolve_template("auto", format, tiny_tokenizer()) == with_chat
    assert resolve_template("auto", format, tiny_tokenizer(chat_template=None)) == without


@pytest.mark.parametrize("spec", ["plain", "alpaca", "chat"])
@pytest.mark.parametrize(
    ("format", "values"),
    [
        ("alpaca", {"instruction": "i", "input": "j", "output": "a"}),
        ("sql", {"question": "q", "context": "c", "answer": "a"}),
        ("prompt_completion", {"prompt": "p\n", "completion": "\na"}),
        ("chat", {"messages": TURNS[:2]}),
    ],
)
def test_the_prompt_of_a_row_is_what_training_put_before_the_answer(
    spec: str, format: str, values: dict[str, Any]
) -> None:
    """Generation used another prompt than training, by a byte."""
    template = make_template(spec, format, tiny_tokenizer())
    example = _example(format, **values)
    segments = template.segments(example)
    assert template.prompt(example) == template.prompt(example.without_answer()) == segments[0].text
    assert example.answer in segments[1].text
    assert [s.supervised for s in segments] == [False, True]


def test_a_bare_text_is_rendered_like_a_record() -> None:
    chat = make_template("chat", "alpaca", tiny_tokenizer())
    row = _example("alpaca", instruction="Say hi.", input="", output="hi")
    assert chat.user_prompt("Say hi.") == chat.prompt(row)
    assert make_template("plain", "text", tiny_tokenizer()).user_prompt("Once") == "Once"


@pytest.mark.parametrize("spec", ["plain", "alpaca", "chat"])
@pytest.mark.parametrize("format", ["alpaca", "sql", "qa", "prompt_completion", "chat", "guanaco"])
def test_the_first_prompt_of_a_conversation_is_that_of_generate(spec: str, format: str) -> None:
    """`chat` asked every run with the tokenizer's chat template, whatever it was trained with."""
    asked = [{"role": "user", "content": "Who?"}]
    template = make_template(spec, format, tiny_tokenizer())
    assert template.conversation_prompt(asked) == template.user_prompt("Who?")
    briefed = make_template(spec, format, tiny_tokenizer(), system="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert template.conversation_prompt([system, *asked]) == briefed.user_prompt("Who?")
    assert briefed.conversation_prompt(asked) == template.user_prompt("Who?")


@pytest.mark.parametrize("spec", ["plain", "chat"])
def test_a_conversation_is_rendered_like_a_record_of_several_turns(spec: str) -> None:
    """The answer's own space came on top of the one that the template writes."""
    template = make_template(spec, "chat", tiny_tokenizer())
    said = [TURNS[0], {"role": "assistant", "content": " b"}, TURNS[2]]
    assert template.conversation_prompt(said) == template.prompt(_example("chat", messages=TURNS))


@pytest.mark.parametrize(("spec", "format"), [("alpaca", "chat"), ("plain", "sql"), ("plain", "text")])
def test_a_conversation_that_the_template_has_no_place_for_is_refused(spec: str, format: str) -> None:
    """Earlier turns were left out of the prompt without a word."""
    template = make_template(spec, format, tiny_tokenizer())
    with pytest.raises(DataError, match=r"the conversation: the .* template holds one question"):
        template.conversation_prompt(TURNS[:3])
    if format == "text":
        with pytest.raises(DataError, match="one question"):
            template.conversation_prompt([{"role": "system", "content": "S"}, TURNS[0]])


def test_a_system_message_is_the_first_line_or_refused_never_ignored() -> None:
    tokenizer = tiny_tokenizer()
    record = _example("alpaca", instruction="i", output="a")
    for spec in ("plain", "alpaca"):
        template = make_template(spec, "alpaca", tokenizer, system="Be brief.")
        assert template.prompt(record).startswith("Be brief.\n")
    own = _example("chat", messages=[{"role": "system", "content": "Mine."}, *TURNS])
    assert make_template("plain", "chat", tokenizer, system="Be brief.").prompt(own).startswith("Mine.\n")
    with pytest.raises(DataError, match="no place for a system message"):
        make_template("auto", "text", tokenizer, system="Be brief.")


def test_refusals() -> None:
    tokenizer = tiny_tokenizer(chat_template=None)
    with pytest.raises(DataError, match="no chat template"):
        make_template("chat", "alpaca", tokenizer)
    with pytest.raises(DataError, match="did you mean alpaca"):
        make_template("alpacca", "alpaca", tokenizer)
    with pytest.raises(DataError, match="no end-of-sequence token"):
        make_template("plain", "alpaca", tiny_tokenizer(eos=None))
    with pytest.raises(DataError, match="used as they are"):
        make_template("alpaca", "text", tokenizer)
    with pytest.raises(DataError, match=r"a.jsonl:1: the alpaca template holds one question"):
        make_template("alpaca", "chat", tokenizer).segments(_example("chat", messages=TURNS))
