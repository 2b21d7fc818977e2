"""The boundary between prompt and answer, and the start of a text, exact to the token."""

from __future__ import annotations

import pytest
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from leantune.data.templates import Segment, make_template
from leantune.data.tokens import SegmentEncoder
from tests.fixtures import CHATML, LLAMA2, tiny_tokenizer

BOS, EOS = 2, 3  # <s> and </s> of the fixture


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("prompt", ["the answer", "the answer ", "the answer:\n", "", "x\n\n "])
@pytest.mark.parametrize("answer", ["the man", " the man", "\nthe man", "\n\n the"])
def test_prompt_tokens_are_those_of_generation_whatever_the_answer_starts_with(
    prompt: str, answer: str
) -> None:
    """A token over the boundary was masked, or belonged to the prompt in training only."""
    tokenizer = tiny_tokenizer()
    encoder = SegmentEncoder(tokenizer)
    segments = [Segment(prompt), Segment(answer, supervised=True, eos=True)]
    encoded = encoder.encode([segments])[0]
    size = len(_ids(tokenizer, prompt))
    assert encoded.prompt_length == size
    assert encoded.ids[:size] == encoder.encode_prompts([prompt])[0].ids == _ids(tokenizer, prompt)
    assert encoded.ids[size:] == [*_ids(tokenizer, answer), tokenizer.eos_token_id]
    assert not any(encoded.supervised[: max(size, 1)])
    assert all(encoded.supervised[max(size, 1) :])


def test_the_naive_way_would_differ() -> None:
    """The case above is a real one: one token can straddle the boundary."""
    tokenizer = tiny_tokenizer()
    assert _ids(tokenizer, "said ") + _ids(tokenizer, "the") != _ids(tokenizer, "said the")


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [CHATML, LLAMA2])
def test_exactly_one_bos(adds_bos: bool, template: str) -> None:
    """A template that writes BOS and a tokenizer that adds it gave two."""
    tokenizer = tiny_tokenizer(eos="</s>", bos="<s>", adds_bos=adds_bos, chat_template=template)
    prompt = make_template("chat", "prompt_completion", tokenizer).user_prompt("hello")
    ids = SegmentEncoder(tokenizer).encode_prompts([prompt])[0].ids
    expected = 1 if adds_bos or template == LLAMA2 else 0
    assert ids.count(BOS) == expected
    assert not expected or ids[0] == BOS


def test_bos_is_not_repeated_inside_and_never_learned() -> None:
    tokenizer = tiny_tokenizer(eos="</s>", bos="<s>", adds_bos=True)
    encoded = SegmentEncoder(tokenizer).encode([[Segment("a b", supervised=True, eos=True)]])[0]
    assert encoded.ids.count(BOS) == 1
    assert encoded.ids.count(EOS) == 1
    assert encoded.supervised == [False] + [True] * (len(encoded.ids) - 1)
    assert encoded.prompt_length == 0


def test_a_tokenizer_that_adds_a_space_to_texts_does_not_add_it_to_answers() -> None:
    """The text of a record came back with a space that nobody wrote."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    encoder = SegmentEncoder(tokenizer)
    for answer in ("the man", " the man", "\nthe"):
        encoded = encoder.encode([[Segment("Answer:"), Segment(answer, supervised=True)]])[0]
        assert str(tokenizer.decode(encoded.ids)).strip() == f"Answer:{answer}"


def test_many_records_in_one_call_keep_their_order() -> None:
    tokenizer = tiny_tokenizer()
    encoder = SegmentEncoder(tokenizer)
    records = [[Segment(f"p{i}"), *[Segment(f"a{i}{j}", True) for j in range(i % 3)]] for i in range(7)]
    assert encoder.encode(records) == [encoder.encode([record])[0] for record in records]
