"""From a YAML file and `a.b=c` overrides to one validated `RunConfig`, all problems at once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from leantune.config.checks import cross_check
from leantune.config.messages import describe_all, keys_of
from leantune.config.presets import PRESETS, unknown_preset
from leantune.config.schema import RunConfig
from leantune.config.yaml import parse_yaml_value, read_yaml
from leantune.errors import ConfigError

Tree = dict[str, Any]


def load_config(
    path: str | Path | None,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
    preset: str | None = None,
) -> RunConfig:
    """Read a run file, apply a preset and then `a.b=c` overrides, validate.

    Inside workers that torchrun started (`WORLD_SIZE` in `environ`), a strategy without a
    number of devices takes torchrun's. Raises `ConfigError` listing every problem.
    """
    tree, lines = read_yaml(Path(path)) if path is not None else ({}, {})
    problems = apply_preset(tree, preset) + apply_overrides(tree, overrides)
    source = str(path) if path is not None else None
    return validate(tree, environ or {}, lines=lines, source=source, problems=problems)


def apply_preset(tree: Tree, preset: str | None) -> list[str]:
    """Set the keys that the name of a preset stands for, in place; returns what is wrong with it."""
    if preset is None:
        return []
    if preset not in PRESETS:
        return [unknown_preset(preset)]
    return apply_overrides(tree, PRESETS[preset].overrides())


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
        except (yaml.YAMLError, ValueError) as error:
            problems.append(f"{override!r}: the value is not YAML: {error}")
            continue
        try:
            _set(tree, key.strip().split("."), value)
        except ValueError as error:
            problems.append(f"{override!r}: {error}")
    return problems


def _set(tree: Tree, keys: Sequence[str], value: Any) -> None:
    *parents, leaf = keys
    node = tree
    for depth, parent in enumerate(parents, 1):
        child = node.get(parent)
        if isinstance(child, str):  # `method: lora`, then `method.rank=8`
            child = {"name": child}
        if child is not None and not isinstance(child, dict):
            raise ValueError(
                f"{'.'.join(keys[:depth])} is {child!r} in the run file, not a section with keys"
            )
        node[parent] = child if child is not None else {}
        node = cast(Tree, node[parent])
    node[leaf] = value


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
    world_size = torchrun_processes(environ or {})
    tree = _with_world_size(dict(tree), world_size)
    config: RunConfig | None = None
    try:
        config = checked = RunConfig.model_validate(tree)
    except ValidationError as error:
        found += describe_all(error.errors(), lines or {})
        checked = _without(tree, error.errors())
    if checked is not None:
        found += cross_check(checked)
        found += _check_world_size(checked, world_size)
    if found or config is None:
        raise ConfigError(found, source)
    return config


# What stands for a required key that is missing while the rules across keys are checked.
_STAND_INS: dict[str, Any] = {"model": "?", "model.name": "?", "data": {"train": "?"}, "data.train": "?"}


def _without(tree: Tree, errors: Iterable[Any]) -> RunConfig | None:
    """The configuration without its invalid keys, so that rules across the other keys are still checked."""
    tree = copy.deepcopy(tree)
    for error in errors:
        keys = keys_of(error["loc"])
        node: Tree | None = tree
        for key in keys[:-1]:
            child = node.get(key) if node is not None else None
            node = cast(Tree, child) if isinstance(child, dict) else None
        if node is None:
            continue
        node.pop(error["loc"][-1] if error["type"] == "invalid_key" else keys[-1], None)
        if ".".join(keys) in _STAND_INS:
            node[keys[-1]] = _STAND_INS[".".join(keys)]
    try:
        return RunConfig.model_validate(tree)
    except ValidationError:
        return None


def torchrun_processes(environ: Mapping[str, str]) -> int:
    """The number of processes that torchrun started; 0 outside of it."""
    text = environ.get("WORLD_SIZE", "0")
    if not text.isdecimal():
        raise ConfigError(f"WORLD_SIZE: {text!r} in the environment is not a number of processes; unset it")
    return int(text)


def _with_world_size(tree: Tree, world_size: int) -> Tree:
    """Under torchrun, let the number of devices be torchrun's where the file leaves it open."""
    strategy: Any = tree.get("strategy", {})
    if isinstance(strategy, str):
        strategy = {"name": strategy}
    if not world_size or not isinstance(strategy, dict):
        return tree
    section = cast(Tree, strategy)
    if "devices" not in section and section.get("name") != "single":
        tree["strategy"] = {**section, "devices": world_size}
    return tree


def _check_world_size(config: RunConfig, world_size: int) -> list[str]:
    if not world_size or world_size == config.strategy.devices:
        return []
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    if config.strategy.name == "single" and world_size > 1:
        return [f"strategy: single, but torchrun started {processes}; remove the key, or start one process"]
    return [
        f"strategy.devices: {config.strategy.devices}, but torchrun started {processes}; "
        f"add strategy.devices={world_size}, or remove the key to take torchrun's number"
    ]


def to_tree(config: RunConfig) -> Tree:
    """Plain values of a configuration, ready for YAML or `validate`."""
    return config.model_dump(mode="json")


def to_yaml(config: RunConfig) -> str:
    """The whole configuration, defaults included, as YAML that `load_config` reads back."""
    return yaml.safe_dump(  # pyright: ignore[reportUnknownMemberType]
        to_tree(config), sort_keys=False, allow_unicode=True
    )
