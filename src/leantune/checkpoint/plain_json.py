"""JSON that says exactly what was in memory: non-finite floats survive, anything else odd is refused.

JSON has no NaN and no infinity; they are written as `{"$float": "nan"}`, "inf" or "-inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, cast

from leantune.errors import CheckpointError

_TAG = "$float"


def encode(value: Any) -> bytes:
    """Plain values (None, bool, int, float, str, lists, tuples, string-keyed mappings) as UTF-8 JSON.

    Tuples come back as lists. Raises `CheckpointError` naming the place of any other value.
    """
    return (json.dumps(_tag(value, ""), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def decode(data: bytes) -> Any:
    """The values that `encode` wrote; raises `ValueError` if it is not that."""
    return json.loads(data, object_hook=_untag)


def _tag(value: Any, place: str) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: str(value)}
    if isinstance(value, list | tuple):
        return [_tag(item, f"{place}[{i}]") for i, item in enumerate(cast("list[Any]", value))]
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        for key in mapping:
            if type(key) is not str or key == _TAG:
                raise CheckpointError(
                    f"{place or 'the state'} has the key {key!r}; keys must be plain strings"
                )
        return {key: _tag(item, f"{place}.{key}" if place else key) for key, item in mapping.items()}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        f"{place or 'the state'} is a {kind}, which JSON cannot hold exactly; "
        "convert it to a plain number, string, list or mapping first"
    )


def _untag(mapping: dict[str, Any]) -> Any:
    return float(mapping[_TAG]) if mapping.keys() == {_TAG} else mapping
