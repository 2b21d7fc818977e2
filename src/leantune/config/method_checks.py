"""Rules inside the `method` section: layers, positions, targets, and which methods go together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from leantune.config.axes import DoraMethod, LoraMethod, ReftMethod, TogetherMethod, parts_of
from leantune.config.layers import parse_layers
from leantune.config.positions import parse_position
from leantune.config.schema import RunConfig
from leantune.config.subspaces import Subspaces


def check_method(config: RunConfig) -> list[str]:
    """Every problem of `method`."""
    problems: list[str] = []
    if isinstance(config.method, TogetherMethod):
        problems += _check_together(config.method)
    for method in parts_of(config.method):
        if isinstance(method, LoraMethod | DoraMethod):
            problems += _check_factors(method)
        if isinstance(method, ReftMethod):
            problems += _check_reft(method)
    return problems


def _check_factors(method: LoraMethod | DoraMethod) -> list[str]:
    problems = _readable({"method.layers": (parse_layers, method.layers)})
    if isinstance(method.target_modules, str):
        try:
            re.compile(method.target_modules)
        except re.error as error:
            problems.append(
                f"method.target_modules: {method.target_modules!r} is not a regular expression: {error}"
            )
    if method.target_modules == ():
        problems.append("method.target_modules: the list is empty; nothing would be trained")
    return problems


def _check_reft(method: ReftMethod[Any]) -> list[str]:
    written: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "method.layers": (parse_layers, method.layers),
        "method.position": (parse_position, method.position),
        "method.subspaces": (lambda names: Subspaces.read(largest_rank(method), names), method.subspaces),
    }
    for number, group in enumerate(method.interventions):
        key = f"method.interventions[{number}]"
        written[f"{key}.layers"] = (parse_layers, group.layers)
        written[f"{key}.position"] = (parse_position, group.position or method.position)
    problems = _readable(written)
    if method.interventions and method.layers != "all":
        problems.append(
            "method.layers: has no effect here, because method.interventions names layers; remove the key"
        )
    return problems or _check_untied(method)


def _check_untied(method: ReftMethod[Any]) -> list[str]:
    groups = [(g.position or method.position, g.tied) for g in method.interventions] or [
        (method.position, None)
    ]
    for position, tied in groups:
        one_end = not parse_position(position).parts
        if one_end and not (method.tied if tied is None else tied):
            return [
                f"method.tied: false, but position {position} has no first and last tokens to tell apart; "
                "use fN+lM, or tied: true"
            ]
    return []


def largest_rank(method: ReftMethod[Any]) -> int:
    """Dimensions of the largest subspace that is edited."""
    return max([group.rank or method.rank for group in method.interventions], default=method.rank)


def _check_together(method: TogetherMethod) -> list[str]:
    names = [part.name for part in method.parts]
    factors = sum(isinstance(part, LoraMethod | DoraMethod) for part in method.parts)
    edits = sum(isinstance(part, ReftMethod) for part in method.parts)
    if (factors, edits) != (1, 1):
        return [
            f"method: {', '.join(names) or 'an empty list'} do not go together; expected one of lora and "
            "dora and one ReFT method, for example [lora, loreft]"
        ]
    if sum(part.train_embeddings for part in method.parts) > 1:
        return [
            "method.train_embeddings: set for both methods; the embeddings are trained once, set it for one"
        ]
    peft = next((part for part in method.parts if getattr(part, "implementation", "") == "peft"), None)
    return (
        ["method.implementation: peft does not go together with another method; remove the key"]
        if peft
        else []
    )


def _readable(written: Mapping[str, tuple[Callable[[Any], Any], Any]]) -> list[str]:
    """What is wrong with values that have a syntax of their own."""
    problems: list[str] = []
    for key, (parse, value) in written.items():
        try:
            parse(value)
        except ValueError as error:
            problems.append(f"{key}: {error}")
    return problems
