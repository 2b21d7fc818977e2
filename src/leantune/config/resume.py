"""What may change when a run is resumed: where and how fast it runs, never what it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from leantune.config.axes import DdpStrategy, FsdpStrategy, SingleStrategy
from leantune.config.load import apply_overrides, torchrun_processes, validate
from leantune.config.schema import RunConfig
from leantune.config.yaml import read_yaml

_CHANGEABLE = (
    "strategy",
    "train.micro_batch_size",
    "train.activation_checkpointing",
    "train.checkpoint_every_blocks",
    "train.activation_offload",
    "train.loss_chunk_tokens",
    "train.cache_frozen_prefix",
    "train.prefix_cache_gib",
    "train.device",
    "eval.micro_batch_size",
    "output.checkpoint_every_steps",
    "output.keep_checkpoints",
    "output.trackers",
    "output.project",
)
_STRATEGIES = {"single": SingleStrategy, "ddp": DdpStrategy, "fsdp": FsdpStrategy}


def resumed_config(path: Path, overrides: Sequence[str], environ: Mapping[str, str]) -> RunConfig:
    """The configuration of a run, moved to other devices by `overrides`.

    The records of a step stay what they were. If they no longer divide into full passes of
    all devices, the micro-batches shrink. Raises `ConfigError` for overrides that would
    change the outcome.
    """
    tree, lines = read_yaml(path)
    overrides = [_by_name(override) for override in overrides]
    keys = [override.partition("=")[0].strip() for override in overrides]
    problems = [
        f"{key}: cannot change when a run is resumed, the outcome would be another; changeable are "
        f"{', '.join(_CHANGEABLE)}"
        for key in keys
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in _CHANGEABLE)
    ]
    world_size = torchrun_processes(environ)
    before, wanted = _section(tree, "strategy"), _wanted_strategy(overrides)
    moved = world_size > 1 or "strategy.devices" in keys
    if wanted is not None or moved:
        tree["strategy"] = _carried(before, wanted, moved)
    problems += apply_overrides(tree, overrides)
    after = _section(tree, "strategy")
    section = _STRATEGIES.get(after.get("name", "single"), SingleStrategy)
    devices = after.get("devices") or world_size or section.model_fields["devices"].default
    if isinstance(devices, int) and devices > 1 and "timeout_seconds" in before:
        after.setdefault("timeout_seconds", before["timeout_seconds"])
    if "train.micro_batch_size" not in keys:
        _fit_micro_batches(tree, devices)
    return validate(tree, environ, lines=lines, source=str(path), problems=problems)


def _by_name(override: str) -> str:
    """`strategy=fsdp` as `strategy.name=fsdp`, so that it keeps the rest of the section like that."""
    key, _, value = override.partition("=")
    is_name = key.strip() == "strategy" and value.strip() in _STRATEGIES
    return f"strategy.name={value.strip()}" if is_name else override


def _wanted_strategy(overrides: Sequence[str]) -> str | None:
    """The name of the strategy that the overrides ask for."""
    pairs = (override.partition("=") for override in overrides)
    names = [value.strip() for key, _, value in pairs if key.strip() == "strategy.name"]
    return names[-1] if names else None


def _carried(before: Mapping[str, Any], wanted: str | None, moved: bool) -> dict[str, Any]:
    """The keys of a strategy that hold on as the run goes on: those that the next one has too.

    Without a wanted name, a run on other devices stays fsdp, or becomes single or ddp by their number.
    """
    name = wanted or before.get("name")
    if name not in _STRATEGIES or (wanted is None and name != "fsdp"):
        return {}
    kept = set(_STRATEGIES[name].model_fields)
    if moved or "single" in (name, before.get("name")):
        kept -= {"devices", "nodes"}
    return {key: value for key, value in before.items() if key in kept}


def _fit_micro_batches(tree: dict[str, Any], devices: Any) -> None:
    train = _section(tree, "train")
    if not isinstance(devices, int) or devices < 1:
        return
    records, micro = train.get("global_batch_size"), train.get("micro_batch_size", 4)
    if not isinstance(records, int) or not isinstance(micro, int):
        return
    while micro > 1 and records % (micro * devices):
        micro -= 1
    train["micro_batch_size"] = micro


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    value = tree.get(name)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
