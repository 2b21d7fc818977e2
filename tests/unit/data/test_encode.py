"""Truncation, dropping, the one end token, and the counts of all that."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from leantune.data.encode import EncodingRules, encode_examples, random_records
from leantune.data.formats import to_example
from leantune.data.readers import Row
from leantune.data.records import EncodedRecords
from leantune.data.templates import make_template
from leantune.errors import DataError
from tests.fixtures import tiny_tokenizer


def _encode(
    records: list[dict[str, Any]],
    max_length: int = 1000,
    *,
    format: str = "prompt_completion",
    template: str = "plain",
    too_long: Literal["truncate", "drop"] = "truncate",
    train_on: Literal["answer", "all"] = "answer",
    pad: str | None = "<pad>",
) -> EncodedRecords:
    examples = [to_example(Row(values, f"a:{i}", i), format) for i, values in enumerate(records)]
    rendered = make_template(template, format, tiny_tokenizer(pad=pad))
    return encode_examples(examples, rendered, EncodingRules(max_length, too_long, train_on), source="a")


def _pair(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


LONG = "x" * 50  # letters that no merge joins: one token each


@pytest.mark.parametrize("template", ["plain", "chat"])
@pytest.mark.parametrize("pad", ["<|im_end|>", "<pad>", None])
def test_exactly_one_end_token_is_learned_per_answer(template: str, pad: str | None) -> None:
    """With pad = eos the end token was masked; with templates that write it there were two."""
    encoded = _encode([_pair("a", "b"), _pair("a", "b<|im_end|>")], template=template, pad=pad)
    for i in range(2):
        learned = encoded[i].tokens[encoded[i].supervised]
        assert learned.tolist().count(1) == 1
        assert learned[-1] == 1
        assert encoded[i].tokens[-1] == 1


def test_records_whose_prompt_fills_max_length_are_dropped_and_counted() -> None:
    encoded = _encode([_pair(LONG, "b"), _pair("a", "b"), _pair("a", ""), _pair("a", LONG)], max_length=20)
    assert encoded.sample_ids.tolist() == [1, 3]
    assert encoded.facts.dropped == {"prompt fills max_length": 1, "empty answer": 1}
    assert (encoded.facts.num_records, encoded.facts.num_kept, encoded.facts.num_truncated) == (4, 2, 1)
    assert encoded.facts.longest == 20
    assert all(record.supervised.any() for record in encoded)  # pyright: ignore[reportGeneralTypeIssues]


def test_nothing_left_is_an_error_with_the_counts() -> None:
    with pytest.raises(DataError, match=r"none of the 2 records.*1 × empty answer, 1 × prompt fills"):
        _encode([_pair(LONG, "b"), _pair("a", "")], max_length=20)


def test_a_truncated_answer_has_no_end_token() -> None:
    """A cut answer taught the model to stop in the middle."""
    record = _encode([_pair("a", LONG)], max_length=20)[0]
    assert len(record.tokens) == 20
    assert 1 not in record.tokens


def test_too_long_records_are_dropped_if_asked() -> None:
    encoded = _encode([_pair("a", LONG), _pair("a", "b")], max_length=20, too_long="drop")
    assert encoded.sample_ids.tolist() == [1]
    assert encoded.facts.dropped == {"longer than max_length": 1}
    assert encoded.facts.num_truncated == 0


def test_train_on_all_learns_all_but_the_first_token_and_keeps_the_prompt_length() -> None:
    answer, whole = (_encode([_pair("a b c", "d")], train_on=mode) for mode in ("answer", "all"))
    assert whole[0].supervised.tolist() == [False] + [True] * (len(whole[0].tokens) - 1)
    assert whole[0].prompt_length == answer[0].prompt_length == len(tiny_tokenizer()("a b c")["input_ids"])


def test_text_learns_all_but_the_first_token_and_ends_once() -> None:
    record = _encode([{"text": "the man"}], format="text")[0]
    assert record.supervised.tolist() == [False] + [True] * (len(record.tokens) - 1)
    assert record.tokens.tolist().count(1) == 1
    assert record.prompt_length == 0


def test_an_empty_prompt_leaves_the_first_token_unlearned() -> None:
    record = _encode([_pair("", "bb")])[0]
    assert record.prompt_length == 0
    assert not record.supervised[0]


def test_facts_count_tokens() -> None:
    encoded = _encode([_pair("a", "b"), _pair("aa", "b")])
    assert encoded.facts.total_tokens == len(encoded.tokens) == int(encoded.offsets[-1])
    assert encoded.facts.supervised_tokens == int(encoded.supervised.sum()) == 4
    assert encoded.tokens.dtype == np.int32
    assert encoded.supervised.dtype == np.bool_


def test_random_records_are_seeded_and_of_one_length() -> None:
    first, second, other = (random_records(5, 16, [7, 8, 9], seed) for seed in (1, 1, 2))
    assert first.lengths.tolist() == [16] * 5
    assert set(first.tokens.tolist()) <= {7, 8, 9}
    assert first[4].supervised.tolist() == [False] + [True] * 15
    assert first.prompt_lengths.tolist() == [4] * 5
    assert np.array_equal(first.tokens, second.tokens)
    assert not np.array_equal(first.tokens, other.tokens)
