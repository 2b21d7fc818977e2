"""Text of an answer that never has to be taken back."""

from __future__ import annotations

import pytest

from leantune.generate.pieces import TextPieces
from tests.fixtures import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id


def told(text: str, *stop: str, more: tuple[int, ...] = ()) -> tuple[list[str], TextPieces]:
    """The pieces of a text, token by token, the last one that of the end."""
    pieces = TextPieces(TOKENIZER, frozenset([EOS]), stop)
    tokens = [*TOKENIZER(text)["input_ids"], *more]
    return [*(pieces.put(token) for token in tokens), pieces.end()], pieces


def test_half_a_character_waits_for_its_rest() -> None:
    found, _ = told("a 🦙 b")
    assert "".join(found) == "a 🦙 b"
    assert all("\ufffd" not in piece for piece in found)


def test_text_ends_before_a_stop_token() -> None:
    found, pieces = told("the old man", more=(EOS, *TOKENIZER(" said")["input_ids"]))
    assert "".join(found) == "the old man"
    assert pieces.stopped
    assert len(pieces.tokens) == len(TOKENIZER("the old man")["input_ids"])


@pytest.mark.parametrize("stop", [(" man",), ("man said", " man"), ("n s", " man s", " man")])
def test_a_stop_string_is_never_shown_not_even_its_beginning(stop: tuple[str, ...]) -> None:
    """Pieces that were sent cannot be taken back when the rest of the stop string comes."""
    found, pieces = told("the old man said to the woman", *stop)
    ends = ["the old man said to the woman".index(s) for s in stop]
    assert "".join(found) == "the old man said to the woman"[: min(ends)]
    assert pieces.stopped


def test_the_beginning_of_a_stop_string_that_does_not_come_is_text() -> None:
    found, pieces = told("the old man", "old man said")
    assert "".join(found) == "the old man"
    assert found[-1] == "old man"
    assert not pieces.stopped
