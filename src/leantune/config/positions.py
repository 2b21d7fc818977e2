"""Which tokens of a prompt an intervention edits, as people write it: `f7+l7`, `all`, `0;3;-1`, `markers`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# What l1 is: the last token of the prompt, or (as in the Alpaca script of pyreft) the one before it.
CONVENTIONS = ("standard", "pyreft-alpaca")
_EXPECTED = "write f7+l7, f1, l1, all, markers, or indices such as 0;3;-1"


@dataclass(frozen=True)
class Positions:
    """Tokens of a prompt: `first` and `last` ones, `every` one, single ones by index, or those in markers."""

    first: int = 0
    last: int = 0
    every: bool = False
    indices: tuple[int, ...] = ()
    markers: bool = False

    @property
    def parts(self) -> tuple[Literal["first", "last"], ...]:
        """The ends of the prompt that untied interventions are made for."""
        both: tuple[Literal["first", "last"], ...] = ("first", "last")
        return tuple(name for name in both if getattr(self, name))


def parse_position(value: str | Sequence[int]) -> Positions:
    """Read a position. `fN+lM`: N first and M last tokens; a negative index counts from the end (-1: last).

    Raises `ValueError` saying what is wrong.
    """
    if not isinstance(value, str):
        return _from_indices(value)
    text = value.strip()
    if text in ("all", "markers"):
        return Positions(every=text == "all", markers=text == "markers")
    if re.fullmatch(r"-?\d+(\s*[;,]\s*-?\d+)*", text):
        return _from_indices([int(part) for part in re.split(r"[;,]", text)])
    match = re.fullmatch(r"(?:f(\d+))?\s*(\+?)\s*(?:l(\d+))?", text)
    first, last = (int(match[1] or 0), int(match[3] or 0)) if match else (0, 0)
    joined = match is not None and bool(match[2]) == (match[1] is not None and match[3] is not None)
    if not joined or first + last == 0:
        raise ValueError(f"{value!r} is not a position; {_EXPECTED}")
    return Positions(first, last)


def _from_indices(indices: Sequence[int]) -> Positions:
    if not indices:
        raise ValueError(f"no positions are listed; {_EXPECTED}")
    repeated = sorted({index for index in indices if list(indices).count(index) > 1})
    if repeated:
        raise ValueError(f"position {repeated[0]} is listed twice")
    return Positions(indices=tuple(indices))
