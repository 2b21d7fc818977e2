"""The help and the JSON schema: complete, because both are made from the schema itself."""

from __future__ import annotations

import json
import re
from typing import Any

from leantune.config.describe import help_text, iterate_fields, json_schema, known_keys

SCHEMA: dict[str, Any] = json.loads(json_schema())


def test_every_key_is_described() -> None:
    undescribed = [key for key, _, field in iterate_fields() if not field.description]
    assert undescribed == []


def test_the_help_names_every_key_with_its_owner() -> None:
    text = help_text()
    for key, owner, field in iterate_fields():
        assert f"  {key}{f' [{owner}]' if owner else ''} = " in text
        assert str(field.description) in text


def test_known_keys_of_one_method_leave_out_those_of_the_others() -> None:
    assert "method.position" in known_keys("loreft")
    assert "method.position" not in known_keys("lora")
    assert "train.epochs" in known_keys("lora")


def test_known_keys_of_one_method_keep_those_of_the_other_axes() -> None:
    """`bits` under `method: lora` found no suggestion, as if only the method's own keys existed."""
    for method in ("lora", "full"):
        assert {"base.bits", "base.double_quant", "strategy.sharding"} <= set(known_keys(method))
    assert "base.bits" not in known_keys("nf4")


def test_the_help_tells_the_values_of_a_base_apart() -> None:
    text = help_text()
    for line in ("base.name [nf4] = nf4", "base.double_quant [nf4] = false", "base.bits [hqq] = 4"):
        assert f"  {line}\n" in text


def _sections(node: Any) -> list[dict[str, Any]]:
    """The object schemas that a node of the JSON schema allows, references resolved."""
    if "$ref" in node:
        return _sections(SCHEMA["$defs"][node["$ref"].rpartition("/")[2]])
    if "properties" in node:
        return [node]
    return [s for key in ("anyOf", "oneOf", "allOf") for part in node.get(key, []) for s in _sections(part)]


def _keys(node: Any, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for section in _sections(node):
        for name, child in section["properties"].items():
            below = _keys(child, f"{prefix}{name}.")
            found |= below or {f"{prefix}{name}"}
    return found


def test_the_json_schema_names_exactly_the_known_keys() -> None:
    assert _keys(SCHEMA) == set(known_keys())


def test_the_json_schema_is_closed_and_its_references_resolve() -> None:
    assert SCHEMA["$schema"].startswith("https://json-schema.org/")
    assert SCHEMA["required"] == ["model", "data"]
    for reference in re.findall(r'"#/\$defs/(\w+)"', json_schema()):
        assert SCHEMA["$defs"][reference]["additionalProperties"] is False
    assert SCHEMA["additionalProperties"] is False


def test_the_json_schema_accepts_the_shorthands() -> None:
    """An editor must not underline `method: lora`, which works."""
    for key in ("model", "method", "base", "strategy"):
        assert {"type": "string"} in SCHEMA["properties"][key]["anyOf"]
    assert {"type": "integer"} in SCHEMA["$defs"]["LoraMethod"]["properties"]["layers"]["anyOf"]
