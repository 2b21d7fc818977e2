"""Validation errors in words: the key and its line, the value, what was expected, the fix."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from leantune.config.describe import iterate_fields, known_keys
from leantune.config.grid import BASES, METHODS, STRATEGIES
from leantune.config.objectives import OBJECTIVES

_UNIONS = {"method": METHODS, "base": BASES, "strategy": STRATEGIES, "objective": OBJECTIVES}


def describe_all(errors: Sequence[Any], lines: Mapping[str, int]) -> list[str]:
    """One line for each problem; where a key may be text or a list, only what the list complains of."""
    lists = {tuple(keys_of(e["loc"])) for e in errors if e["loc"][-1] != "str"}
    kept = [e for e in errors if e["loc"][-1] != "str" or tuple(keys_of(e["loc"])) not in lists]
    return list(dict.fromkeys(_describe(error, lines) for error in kept))


def _describe(error: Any, lines: Mapping[str, int]) -> str:
    """One pydantic error as `key (line N): value, what was expected, the fix`."""
    parts = [str(part) for part in error["loc"]]
    keys = keys_of(error["loc"])
    dotted = ".".join(keys)
    line, where = lines.get(dotted), _written(error["loc"])
    where = f"{where} (line {line})" if line else where
    kind = error["type"]
    if kind == "invalid_key":
        return f"{dotted}: a key must be text, not {error['input']!r}"
    if kind == "extra_forbidden":
        close = _did_you_mean(dotted, parts)
        return f"{where}: unknown key{close}"
    if kind == "missing" and isinstance(error["loc"][-1], int):
        return f"{where}: {error['input']!r} has too few members"
    if kind == "missing":
        return f"{where}: required, but missing"
    if kind == "union_tag_invalid":
        expected = error["ctx"]["expected_tags"].replace("'", "")
        hint = _closest(error["ctx"]["tag"], expected)
        return f"{where}.name: {error['ctx']['tag']!r} is not one of {expected}{hint}"
    if kind == "union_tag_not_found":
        return f"{where}: name is missing; write for example `{dotted}: {{name: ...}}`"
    if kind == "literal_error":
        expected = error["ctx"]["expected"].replace("'", "")
        return f"{where}: {error['input']!r} is not one of {expected}{_closest(error['input'], expected)}"
    if kind in ("model_type", "model_attributes_type"):
        return f"{where}: {error['input']!r} is not a section; write its keys indented below it, or remove it"
    message = error["msg"][0].lower() + error["msg"][1:]
    message = message.replace("input ", "").replace("tuple", "list")
    return f"{where}: {error['input']!r} is not valid: {message}"


def keys_of(place: Sequence[int | str]) -> list[str]:
    """The keys of a place in the tree, without what pydantic adds: tags of unions, names of variants."""
    first, *below = _written_keys(place)
    return [first, *(key for key in below if not key.isdigit())]


def _written_keys(place: Sequence[int | str]) -> list[str]:
    """As `keys_of`, with the numbers of the members of lists."""
    parts = [str(part) for part in place]
    tagged = len(parts) > 1 and parts[1] in _UNIONS.get(parts[0], ())
    parts = [parts[0], *parts[2:]] if tagged else parts
    if parts[:2] == ["method", "parts"]:  # behind its number each part has a tag
        parts = [*parts[:3], *parts[4:]]
    return [parts[0], *(p for p in parts[1:] if p != "str" and "[" not in p)]


def _written(place: Sequence[int | str]) -> str:
    """A place as people write it: `method.parts[0].rank`."""
    first, *below = _written_keys(place)
    if below and below[-1].isdigit():  # the value itself tells which member it is
        below.pop()
    return first + "".join(f"[{key}]" if key.isdigit() else f".{key}" for key in below)


def _closest(value: Any, expected: str) -> str:
    """A did-you-mean for a value, if one of the `a, b or c` expected is near."""
    options = expected.replace(" or ", ", ").split(", ")
    begun = [option for option in options if option.startswith(f"{value}_")]  # fp16 for fp16_mixed
    close = begun or difflib.get_close_matches(str(value), options, 1, 0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _did_you_mean(dotted: str, parts: list[str]) -> str:
    tag = parts[1] if len(parts) > 2 and parts[0] in _UNIONS else None
    tag = parts[4] if parts[2:3] == ["parts"] and len(parts) > 5 else tag
    known = known_keys(tag, in_lists=any(part.isdigit() for part in parts))
    prefix, _, leaf = dotted.rpartition(".")
    start = f"{prefix}." if prefix else ""
    siblings = dict.fromkeys(key[len(start) :].partition(".")[0] for key in known if key.startswith(start))
    owners = dict.fromkeys(owner for key, owner, _ in iterate_fields() if key == dotted and owner)
    if owners:  # a key of other values of this axis, such as a preset leaves behind
        return f"; known here: {', '.join(sorted(siblings))}; {leaf} belongs to {', '.join(owners)}"
    close = difflib.get_close_matches(leaf, siblings, 1, 0.6)
    if close:
        return f"; did you mean {start}{close[0]}?"
    elsewhere = [key for key in known if key.rpartition(".")[2] == leaf]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; known here: {', '.join(sorted(siblings))}" if siblings else ""
