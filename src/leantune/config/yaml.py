"""YAML as runs use it: `1e-4` is a number, a key may stand once, and each key knows its line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from leantune.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """PyYAML follows YAML 1.1, where `1e-4` is a string; here it is the number people mean."""


_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*)(?:\.\d*)?[eE][-+]?\d+$|^[-+]?\.\d+[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_yaml_value(text: str) -> Any:
    """The value that `text` has in a run file; raises `yaml.YAMLError` or `ValueError` if it is not YAML."""
    return yaml.load(text, Loader=_Loader)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Read a run file into a tree and a table of line numbers by dotted key.

    Raises `ConfigError` if the file is missing, is not UTF-8 YAML, is not a mapping, or
    repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        node = yaml.compose(text, Loader=_Loader)
        tree = yaml.load(text, Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-13-01
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path} must be a mapping of sections (model:, data:, method:, ...)")
    lines: dict[str, int] = {}
    problems: list[str] = []
    _collect_lines(node, "", lines, problems)
    if problems:
        raise ConfigError(problems, str(path))
    return tree, lines


def _collect_lines(node: yaml.MappingNode, prefix: str, lines: dict[str, int], problems: list[str]) -> None:
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
        if key in lines:
            problems.append(f"{key}: stands twice, on line {lines[key]} and line {line}; keep one")
        lines[key] = line
        if isinstance(value_node, yaml.MappingNode):
            _collect_lines(value_node, f"{key}.", lines, problems)
