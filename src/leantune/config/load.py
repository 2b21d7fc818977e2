"""From a YAML file and `a.b=c` overrides to one validated `RunConfig`, all problems at once."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from leantune.config.checks import cross_check
from leantune.config.describe import known_keys
from leantune.config.grid import METHODS, STRATEGIES
from leantune.config.schema import RunConfig
from leantune.config.yaml import parse_yaml_value, read_yaml
from leantune.errors import ConfigError

Tree = dict[str, Any]


def load_config(
    path: str | Path | None, overrides: Iterable[str] = (), environ: Mapping[str, str] | None = None
) -> RunConfig:
    """Read a run file, apply `a.b=c` overrides, validate.

    Inside workers that torchrun started (`WORLD_SIZE` in `environ`), a strategy without a
    number of devices takes torchrun's. Raises `ConfigError` listing every problem.
    """
    tree, lines = read_yaml(Path(path)) if path is not None else ({}, {})
    problems = apply_overrides(tree, overrides)
    source = str(path) if path is not None else None
    return validate(tree, environ or {}, lines=lines, source=source, problems=problems)


def apply_overrides(tree: Tree, overrides: Iterable[str]) -> list[str]:
    """Set `a.b=c` in the tree in place; returns the overrides that could not be read."""
    problems: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            problems.append(f"{override!r}: an override is written section.key=value")
            continue
        try:
            value = parse_yaml_value(text)
        except yaml.YAMLError as error:
            problems.append(f"{override!r}: the value is not YAML: {error}")
            continue
        *parents, leaf = key.strip().split(".")
        node = tree
        for parent in parents:
            child = node.get(parent)
            if isinstance(child, str):  # `method: lora`, then `method.rank=8`
                child = {"name": child}
            node[parent] = child if isinstance(child, dict) else {}
            node = cast(Tree, node[parent])
        node[leaf] = value
    return problems


def validate(
    tree: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    *,
    lines: Mapping[str, int] | None = None,
    source: str | None = None,
    problems: Iterable[str] = (),
) -> RunConfig:
    """Validate a tree of plain values; raises `ConfigError` listing every problem."""
    found = list(problems)
    tree = _with_world_size(dict(tree), environ or {})
    config: RunConfig | None = None
    try:
        config = checked = RunConfig.model_validate(tree)
    except ValidationError as error:
        found += _unique(_describe(item, lines or {}) for item in error.errors())
        checked = _without(tree, [item["loc"] for item in error.errors()])
    if checked is not None:
        found += cross_check(checked)
        found += _check_world_size(checked, environ or {})
    if found or config is None:
        raise ConfigError(found, source)
    return config


def _without(tree: Tree, places: Iterable[tuple[int | str, ...]]) -> RunConfig | None:
    """The configuration without its invalid keys, so that rules across the other keys are still checked."""
    tree = copy.deepcopy(tree)
    for place in places:
        keys = _keys(place)
        node: Any = tree
        for key in keys[:-1]:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict):
            cast(Tree, node).pop(keys[-1], None)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError:
        return None


def _unique(lines: Iterable[str]) -> list[str]:
    """One line for each key: a field that may be text or a list would complain twice."""
    kept: dict[str, str] = {}
    for line in lines:
        kept.setdefault(line.partition(": ")[0], line)
    return list(kept.values())


def _with_world_size(tree: Tree, environ: Mapping[str, str]) -> Tree:
    """Under torchrun, let the number of devices be torchrun's where the file leaves it open."""
    world_size = int(environ.get("WORLD_SIZE", "1"))
    strategy = tree.get("strategy", {})
    if isinstance(strategy, str):
        strategy = {"name": strategy}
    if world_size > 1 and isinstance(strategy, dict) and "devices" not in strategy:
        tree["strategy"] = {**strategy, "devices": world_size}
    return tree


def _check_world_size(config: RunConfig, environ: Mapping[str, str]) -> list[str]:
    world_size = int(environ.get("WORLD_SIZE", "0"))
    if world_size and world_size != config.strategy.devices:
        return [
            f"strategy.devices: {config.strategy.devices}, but torchrun started {world_size} "
            f"process{'es' if world_size > 1 else ''}; add strategy.devices={world_size}, "
            "or remove the key to take torchrun's number"
        ]
    return []


def _describe(error: Any, lines: Mapping[str, int]) -> str:
    """One pydantic error as `key (line N): value, what was expected, the fix`."""
    parts = [str(part) for part in error["loc"]]
    keys = _keys(error["loc"])
    dotted = ".".join(keys)
    line = lines.get(dotted)
    where = f"{dotted} (line {line})" if line else dotted
    kind = error["type"]
    if kind == "extra_forbidden":
        close = _did_you_mean(dotted, parts)
        return f"{where}: unknown key{close}"
    if kind == "missing":
        return f"{where}: required, but missing"
    if kind == "union_tag_invalid":
        expected = error["ctx"]["expected_tags"].replace("'", "")
        close = difflib.get_close_matches(str(error["ctx"]["tag"]), expected.split(", "), 1, 0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"{where}.name: {error['ctx']['tag']!r} is not one of {expected}{hint}"
    if kind == "union_tag_not_found":
        return f"{where}: name is missing; write for example `{dotted}: {{name: ...}}`"
    if kind == "literal_error":
        expected = error["ctx"]["expected"].replace("'", "")
        options = expected.replace(" or ", ", ").split(", ")
        close = difflib.get_close_matches(str(error["input"]), options, 1, 0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"{where}: {error['input']!r} is not one of {expected}{hint}"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{where}: {error['input']!r} is not valid: {message.replace('input ', '')}"


def _keys(place: Sequence[int | str]) -> list[str]:
    """The keys of a place in the tree, without what pydantic adds: tags of unions, names of variants."""
    parts = [str(part) for part in place]
    tagged = parts[0] in _UNIONS and len(parts) > 1 and parts[1] in METHODS + STRATEGIES
    parts = [parts[0], *parts[2:]] if tagged else parts
    return [part for part in parts if part != "str" and "[" not in part and not part.isdigit()]


_UNIONS = ("method", "strategy")


def _did_you_mean(dotted: str, parts: list[str]) -> str:
    tag = parts[1] if len(parts) > 2 and parts[0] in _UNIONS else None
    known = known_keys(tag)
    prefix, _, leaf = dotted.rpartition(".")
    siblings = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == prefix]
    close = difflib.get_close_matches(leaf, siblings, 1, 0.6)
    if close:
        return f"; did you mean {prefix + '.' if prefix else ''}{close[0]}?"
    elsewhere = [key for key in known if key.rpartition(".")[2] == leaf]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; known here: {', '.join(sorted(siblings))}" if siblings else ""


def to_tree(config: RunConfig) -> Tree:
    """Plain values of a configuration, ready for YAML or `validate`."""
    return config.model_dump(mode="json")


def to_yaml(config: RunConfig) -> str:
    """The whole configuration, defaults included, as YAML that `load_config` reads back."""
    return yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True)
