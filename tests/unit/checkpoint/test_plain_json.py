"""JSON must give back what was in memory, or refuse."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from leantune.checkpoint.plain_json import decode, encode
from leantune.errors import CheckpointError


def test_values_come_back_exactly_and_as_valid_json() -> None:
    values = {
        "loss": [math.inf, -math.inf, 0.1, 1e-300, -0.0, 5e-324],
        "count": 2**80,
        "text": "ü\u2028\n",
        "flag": True,
        "none": None,
        "nested": {"a": {}},
    }
    data = encode(values)
    json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = decode(data)
    assert back == values
    assert type(back["flag"]) is bool
    assert math.copysign(1, back["loss"][4]) == -1


def test_nan_comes_back_as_nan() -> None:
    assert math.isnan(decode(encode({"x": math.nan}))["x"])
    assert encode({"x": math.nan}) == encode({"x": decode(encode(math.nan))})


def test_tuples_come_back_as_lists() -> None:
    assert decode(encode({"betas": (0.9, 0.95)})) == {"betas": [0.9, 0.95]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {"b": [0, np.float32(1)]}}, r"a\.b\[1\] is a numpy\.float32"),
        ({"a": {3: 1}}, "a has the key 3"),
        ({"a": b"x"}, "a is a builtins.bytes"),
        ({"a": {"$float": "nan"}}, r"a has the key '\$float'"),
        (object(), "the state is a builtins.object"),
    ],
)
def test_what_json_would_change_silently_is_refused(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode(value)
