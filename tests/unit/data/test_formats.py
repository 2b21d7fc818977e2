"""Recognising the shape of records, mapping columns, and fields that are not texts."""

from __future__ import annotations

from typing import Any

import pytest

from leantune.data.examples import Example
from leantune.data.formats import prompt_example, read_examples
from leantune.data.readers import Row
from leantune.errors import DataError


def _rows(*values: dict[str, Any]) -> list[Row]:
    return [Row(v, f"a.jsonl:{i}", i - 1) for i, v in enumerate(values, start=1)]


def _read(
    *values: dict[str, Any], format: str = "auto", columns: dict[str, str] | None = None
) -> tuple[str, list[Example]]:
    name, examples = read_examples(_rows(*values), format, columns)
    return name, list(examples)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"instruction": "a", "output": "b"}, "alpaca"),
        ({"instruction": "a", "input": "c", "output": "b", "answer": "d"}, "alpaca"),
        ({"prompt": "a", "completion": "b", "id": 3}, "prompt_completion"),
        ({"text": "a"}, "text"),
        ({"text": "### Human: a### Assistant: b"}, "guanaco"),
        ({"question": "a", "answer": "b"}, "qa"),
        ({"question": "a", "answer": "b", "context": "c"}, "qa"),
        ({"question": "a", "answer": "SELECT a", "context": "CREATE TABLE t (a INT)"}, "sql"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "chat"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "chat"),
    ],
)
def test_detection(record: dict[str, Any], expected: str) -> None:
    assert _read(record)[0] == expected


@pytest.mark.parametrize("record", [{"a": "b"}, {"instruction": "a", "output": "b", "text": "c"}])
def test_no_or_several_formats_are_refused_with_the_columns(record: dict[str, Any]) -> None:
    """A guess would train on the wrong text."""
    with pytest.raises(DataError) as error:
        _read(record)
    assert "set data.format" in str(error.value)
    assert ", ".join(sorted(record)) in str(error.value)
    assert "alpaca: instruction, output (input)" in str(error.value)


def test_columns_are_mapped_and_their_names_are_in_errors() -> None:
    name, examples = _read({"q": "a", "a": "b"}, columns={"question": "q", "answer": "a"})
    assert (name, examples[0].fields["question"], examples[0].answer) == ("qa", "a", "b")
    with pytest.raises(DataError, match=r"a.jsonl:2: field 'q' is null"):
        _read({"q": "a", "a": "b"}, {"q": None, "a": "b"}, columns={"question": "q", "answer": "a"})


def test_unknown_fields_and_columns_of_the_mapping_get_a_suggestion() -> None:
    """A misspelt mapping was ignored."""
    record = {"query": "a", "output": "b"}
    with pytest.raises(DataError, match=r"'instructoin' is not a field.*did you mean 'instruction'"):
        _read(record, columns={"instructoin": "query"})
    with pytest.raises(DataError, match=r"no column 'qwery'.*did you mean 'query'"):
        _read(record, columns={"instruction": "qwery"})
    with pytest.raises(DataError, match="'prompt' is not a field of the format alpaca"):
        _read(record, format="alpaca", columns={"prompt": "query"})


def test_null_number_and_text_in_one_column() -> None:
    """The type of the first value decided about the column; a null became the text None."""
    _, examples = _read(
        {"instruction": "a", "input": None, "output": 7},
        {"instruction": 2.5, "input": 3, "output": "text"},
        {"instruction": "c", "output": "d"},
    )
    assert [example.fields["input"] for example in examples] == ["", "3", ""]
    assert [example.answer for example in examples] == ["7", "text", "d"]
    assert examples[1].fields["instruction"] == "2.5"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"instruction": "a"}, "a.jsonl:2: field 'output' is missing (found instruction)"),
        ({"instruction": "a", "output": None}, "a.jsonl:2: field 'output' is null"),
        ({"instruction": True, "output": "b"}, "a.jsonl:2: field 'instruction' is True (bool)"),
        ({"instruction": "a", "output": ["b"]}, "a.jsonl:2: field 'output' is ['b'] (list)"),
        ({"instruction": "a", "output": "b", "input": {}}, "a.jsonl:2: field 'input' is {} (dict)"),
    ],
)
def test_unusable_fields_name_file_line_and_field(record: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError) as error:
        _read({"instruction": "a", "output": "b"}, record)
    assert expected in str(error.value)


def test_empty_answers_and_texts_are_marked_not_fatal() -> None:
    _, examples = _read({"prompt": "a", "completion": " \n"}, {"prompt": "", "completion": "b"})
    assert [example.drop_reason for example in examples] == ["empty answer", None]
    assert _read({"text": ""})[1][0].drop_reason == "empty text"


def test_no_records_is_an_error() -> None:
    with pytest.raises(DataError, match="no records"):
        read_examples([], "auto")


def test_sharegpt_roles_are_mapped_and_unanswered_turns_cut() -> None:
    turns = [("system", "s"), ("human", "a"), ("gpt", "b"), ("human", "c")]
    _, examples = _read({"conversations": [{"from": role, "value": text} for role, text in turns]})
    roles = [message["role"] for message in examples[0].messages]
    assert roles == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("hello", "must be a list of messages"),
        ([{"role": "tool", "content": "x"}], "'messages[0].role' is 'tool'"),
        ([{"role": "user"}], "'messages[0].content' is missing"),
        ([{"role": "user", "content": None}], "'messages[0].content' is None"),
        ([{"role": "user", "content": "a"}], "has no assistant turn"),
        ([], "has no assistant turn"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "a"}], "must come first"),
    ],
)
def test_unusable_messages_name_the_place(messages: Any, expected: str) -> None:
    with pytest.raises(DataError) as error:
        _read({"messages": messages}, format="chat")
    assert str(error.value).startswith("a.jsonl:1: field")
    assert expected in str(error.value)


def test_conversations_that_cannot_be_trained_on_are_marked() -> None:
    start = [{"from": "gpt", "value": "b"}]
    empty = [{"from": "human", "value": "b"}, {"from": "gpt", "value": ""}]
    _, examples = _read({"conversations": start}, {"conversations": empty})
    assert [e.drop_reason for e in examples] == ["starts with an assistant turn", "empty answer"]


def test_guanaco_turns() -> None:
    text = "### Human: a\n### Human?### Assistant: b: ### c ### Human: d### Assistant: e"
    messages = _read({"text": text})[1][0].messages
    assert [m["content"] for m in messages] == ["a\n### Human?", "b: ### c", "d", "e"]
    with pytest.raises(DataError, match=r"a.jsonl:1: field 'text' must start with '### Human:'"):
        _read({"text": "hello"}, format="guanaco")


def test_rows_without_an_answer_are_prompts_when_asked_for() -> None:
    _, examples = read_examples(_rows({"instruction": "a"}), "alpaca", require_answer=False)
    example = next(examples)
    assert not example.has_answer
    assert example.messages == prompt_example("alpaca", "a").messages
