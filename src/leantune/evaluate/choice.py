"""Multiple choice and short answers, as in the commonsense sets of LLM-Adapters (arXiv 2304.01933)."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FORMAT = re.compile(r"answer format\s*:\s*([^\n]+)", re.IGNORECASE)


def options_of(instruction: str) -> list[str]:
    """The options in the last `Answer format: a/b/c` of an instruction; empty if there is none."""
    found = _FORMAT.findall(instruction)
    if not found:
        return []
    return [option for part in found[-1].split("/") if (option := part.strip(" .'\"`"))]


def extract_choice(text: str, options: Sequence[str]) -> str | None:
    """The option that comes first in the text as a whole word, in any case; None if there is none."""
    found: list[tuple[int, int, str]] = []
    for option in options:
        match = re.search(_pattern(option), text, re.IGNORECASE)
        if match:
            # At the same place the longer option is meant: "not true" before "not".
            found.append((match.start(), -len(option), option))
    return min(found)[2] if found else None


def _pattern(option: str) -> str:
    """`answer1` also stands for "answer 1", but not for "answer10"."""
    numbered = re.fullmatch(r"([^\W\d]+)\s*(\d+)", option)
    body = rf"{numbered[1]}\s*{numbered[2]}" if numbered else r"\s+".join(map(re.escape, option.split()))
    return rf"(?<!\w){body}(?!\w)"
