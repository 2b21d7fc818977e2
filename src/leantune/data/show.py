"""One encoded record as text, with the learned tokens marked."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from leantune.data.records import EncodedRecords

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

MARKS = ("⟦", "⟧")


def show_example(
    records: EncodedRecords, tokenizer: PreTrainedTokenizerBase, *, index: int = 0, max_tokens: int = 400
) -> str:
    """A decoded record as plain text; learned tokens stand in ⟦ ⟧."""
    spans = decoded_spans(records, tokenizer, index, max_tokens)
    return "".join(f"{MARKS[0]}{text}{MARKS[1]}" if learned else text for text, learned in spans)


def show_example_styled(
    records: EncodedRecords, tokenizer: PreTrainedTokenizerBase, *, index: int = 0, max_tokens: int = 400
) -> Text:
    """A decoded record for a terminal; learned tokens are bold and green, the rest is dim."""
    from rich.text import Text

    shown = Text()
    for text, learned in decoded_spans(records, tokenizer, index, max_tokens):
        shown.append(text, style="bold green" if learned else "dim")
    return shown


def decoded_spans(
    records: EncodedRecords, tokenizer: PreTrainedTokenizerBase, index: int, max_tokens: int
) -> list[tuple[str, bool]]:
    """Runs of the record's text and whether they are learned; a long record keeps its two ends."""
    record = records[index]
    pairs = list(zip(record.tokens.tolist(), record.supervised.tolist(), strict=True))
    if len(pairs) <= max_tokens:
        return _decode(pairs, tokenizer)
    half = max_tokens // 2
    gap = (f" … {len(pairs) - 2 * half} tokens … ", False)
    return [*_decode(pairs[:half], tokenizer), gap, *_decode(pairs[-half:], tokenizer)]


def _decode(pairs: list[tuple[int, bool]], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    return [
        (
            str(
                tokenizer.decode(
                    [i for i, _ in run], skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            ),
            learned,
        )
        for learned, run in groupby(pairs, key=lambda pair: pair[1])
    ]
