"""The numeric answer of a worked solution, as in GSM8K (arXiv 2110.14168)."""

from __future__ import annotations

import re
from fractions import Fraction

_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u2012": "-"})
# A minus after a digit, a letter or a bracket subtracts; it is not the sign of the number.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]])-)?[$€£]?(?P<sign2>(?<=[$€£])-)?"
    r"(?:(?P<whole>\d{1,15})\s+(?=\d{1,15}\s?/\s?0*[1-9]))?"
    r"(?P<number>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)"
    r"(?:\s?/\s?(?P<below>0*[1-9]\d*))?"
)
_LONGEST = 1000


def extract_number(text: str) -> Fraction | None:
    """The number after the first `####` that has one, else the last number of the text.

    Commas, currency signs, a trailing full stop, `1/2`, `1 1/2` and negative numbers are read.
    """
    text = text.translate(_MINUS)
    for after in re.findall(r"####([^\n#]*)", text):
        match = _NUMBER.search(after)
        if match:
            return _value(match)
    matches = list(_NUMBER.finditer(text))
    return _value(matches[-1]) if matches else None


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _LONGEST:  # a model that repeats a digit for ever has given no answer
        return None
    value = Fraction(match["number"].replace(",", ""))
    if match["below"]:
        value /= int(match["below"])
    if match["whole"]:
        value += int(match["whole"])
    return -value if match["sign"] or match["sign2"] else value
