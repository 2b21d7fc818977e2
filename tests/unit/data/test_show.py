"""A record as the user sees it."""

from __future__ import annotations

from leantune.data.encode import EncodingRules, encode_examples
from leantune.data.formats import to_example
from leantune.data.readers import Row
from leantune.data.records import EncodedRecords
from leantune.data.show import show_example, show_example_styled
from leantune.data.templates import make_template
from tests.fixtures import tiny_tokenizer


def _records(answer: str) -> EncodedRecords:
    example = to_example(Row({"prompt": "ask:", "completion": answer}, "a:1"), "prompt_completion")
    template = make_template("plain", "prompt_completion", tiny_tokenizer())
    return encode_examples([example], template, EncodingRules(1000), source="a")


def test_learned_tokens_stand_in_brackets() -> None:
    assert show_example(_records(" é"), tiny_tokenizer()) == "ask:⟦ é<|im_end|>⟧"


def test_styles_mark_the_learned_tokens() -> None:
    shown = show_example_styled(_records("[b]"), tiny_tokenizer())
    assert shown.plain == "ask:[b]<|im_end|>"
    assert [(span.start, span.style) for span in shown.spans] == [(0, "dim"), (4, "bold green")]


def test_a_long_record_keeps_both_ends() -> None:
    shown = show_example(_records("x" * 100 + "END"), tiny_tokenizer(), max_tokens=20)
    assert shown.startswith("ask:⟦x")
    assert shown.endswith("END<|im_end|>⟧")
    assert "tokens …" in shown
    assert len(shown) < 80
