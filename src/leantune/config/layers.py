"""Lists of layers as people write them: `all`, `8;19`, `0-3;19`."""

from __future__ import annotations

import re
from collections.abc import Sequence


def parse_layers(value: str | Sequence[int]) -> tuple[int, ...] | None:
    """Indices of decoder blocks; None stands for all of them.

    Accepts `all`, `8;19`, `8,19`, ranges such as `0-3;19`, or a sequence of integers.
    Raises `ValueError` saying what is wrong; whether the model has such blocks is checked later.
    """
    if isinstance(value, str):
        if value.strip() == "all":
            return None
        indices: list[int] = []
        for part in re.split(r"[;,]", value):
            match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
            if not match:
                raise ValueError(f"{value!r} is not a list of layers; write all, 8;19, or 0-3;19")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise ValueError(f"the range {part.strip()!r} runs backwards")
            indices.extend(range(first, last + 1))
    else:
        indices = list(value)
    if not indices:
        raise ValueError("no layers are listed")
    if min(indices) < 0:
        raise ValueError(f"layer {min(indices)} is negative; layers count from 0")
    repeated = sorted({index for index in indices if indices.count(index) > 1})
    if repeated:
        raise ValueError(f"layer {repeated[0]} is listed twice")
    return tuple(sorted(indices))
