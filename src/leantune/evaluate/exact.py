"""Exact match of two texts."""

from __future__ import annotations


def exact_match(predicted: str, gold: str, *, ignore_case: bool = False) -> bool:
    """Whether two texts are equal but for the amount and kind of white space."""
    predicted, gold = (" ".join(text.split()) for text in (predicted, gold))
    if ignore_case:
        predicted, gold = predicted.casefold(), gold.casefold()
    return predicted == gold
