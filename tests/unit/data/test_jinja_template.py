"""The user's own template file: where its answers are, and errors that name file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leantune.data.examples import Example
from leantune.data.formats import to_example
from leantune.data.readers import Row
from leantune.data.templates import Segment, Template, make_template
from leantune.errors import DataError
from tests.fixtures import CHATML, tiny_tokenizer

CHAT = {
    "messages": [{"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, "abcd", strict=True)]
}


def _template(folder: Path, text: str, format: str, system: str | None = None) -> Template:
    path = folder / "mine.jinja"
    path.write_text(text)
    return make_template(str(path), format, tiny_tokenizer(), system=system)


def _example(format: str, values: dict[str, Any]) -> Example:
    return to_example(Row(values, "a.jsonl:1"), format)


def _text(segments: list[Segment]) -> str:
    shown = [(s.text + ("*" if s.eos else ""), s.supervised) for s in segments]
    return "".join(f"[{text}]" if learned else text for text, learned in shown)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Q: {{ question }}\nA: {{ answer }}\n", "Q: q\nA: [a*]"),
        ("Q: {{ question }}\nA: {{ answer }}{{ eos_token }} and more", "Q: q\nA: [a<|im_end|>]"),
        (
            "{% if context %}C: {{ context }}{% endif %}Q: {{ question }}\nA:\n{{ answer | trim }}",
            "Q: q\nA:\n[a*]",
        ),
        ("{{ messages[0].content | upper }} {{ messages[-1].content }}", "Q [a*]"),
    ],
)
def test_the_answer_is_found_wherever_it_stands(tmp_path: Path, source: str, expected: str) -> None:
    template = _template(tmp_path, source, "qa")
    record = {"question": "q", "answer": "a"}
    assert _text(template.segments(_example("qa", record))) == expected
    assert template.prompt(_example("qa", record)) == expected.partition("[")[0]
    assert template.user_prompt("q") == expected.partition("[")[0]


def test_several_turns_through_messages(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    segments = _template(tmp_path, source, "chat").segments(_example("chat", CHAT))
    assert _text(segments) == "user: a\nassistant: [b*]\nuser: c\nassistant: [d*]"


def test_a_conversation_needs_a_file_that_writes_messages(tmp_path: Path) -> None:
    """A file that writes one answer would have left the earlier turns out."""
    several = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    said = CHAT["messages"][:3]
    prompt = _template(tmp_path, several, "qa").conversation_prompt(said)
    assert prompt == "user: a\nassistant: b<|im_end|>\nuser: c\nassistant: "
    with pytest.raises(DataError, match=r"mine\.jinja: the template must write each answer once"):
        _template(tmp_path, "Q: {{ question }} A: {{ answer }}", "qa").conversation_prompt(said)
    system = [{"role": "system", "content": "Be brief."}, *said[:1]]
    with pytest.raises(DataError, match="does not write the system message"):
        _template(tmp_path, "Q: {{ question }} A: {{ answer }}", "qa").conversation_prompt(system)


def test_a_chat_template_as_a_file_renders_like_the_tokenizers_own(tmp_path: Path) -> None:
    own = make_template("chat", "chat", tiny_tokenizer()).segments(_example("chat", CHAT))
    assert _text(_template(tmp_path, CHATML, "chat").segments(_example("chat", CHAT))) == _text(own)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a\n{% if %}\n", "mine.jinja:2: not a valid Jinja template"),
        ("a\n\n{{ qestion }} {{ answer }}", "mine.jinja:3: 'qestion' is undefined (record a.jsonl:1"),
        ("{{ question }}", "must write each answer once and in order"),
        ("{{ answer }} {{ answer }}", "it wrote 2"),
        ("{{ answer | length }}", "it wrote 0"),
        ("a\n{{ raise_exception('not today') }}", "mine.jinja:2: not today"),
        ("a\n{{ ''.__class__.__mro__ }}{{ answer }}", "mine.jinja:2: access to attribute"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, source: str, expected: str) -> None:
    with pytest.raises(DataError) as error:
        _template(tmp_path, source, "qa").segments(_example("qa", {"question": "q", "answer": "a"}))
    assert expected in str(error.value)


def test_a_system_message_that_the_file_does_not_write_is_refused(tmp_path: Path) -> None:
    record = _example("qa", {"question": "q", "answer": "a"})
    template = _template(tmp_path, "{{ question }}{{ answer }}", "qa", system="Be brief.")
    with pytest.raises(DataError, match="does not write the system message"):
        template.segments(record)
    source = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    assert _template(tmp_path, source, "qa", system="Be brief.").prompt(record) == "Be brief.|q|"
