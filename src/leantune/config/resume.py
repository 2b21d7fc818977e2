"""What may change when a run is resumed: where and how fast it runs, never what it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from leantune.config.load import apply_overrides, validate
from leantune.config.schema import RunConfig
from leantune.config.yaml import read_yaml

_CHANGEABLE = (
    "strategy",
    "train.micro_batch_size",
    "train.activation_checkpointing",
    "train.device",
    "eval.micro_batch_size",
    "output.checkpoint_every_steps",
    "output.keep_checkpoints",
    "output.trackers",
    "output.project",
)


def resumed_config(path: Path, overrides: Sequence[str], environ: Mapping[str, str]) -> RunConfig:
    """The configuration of a run, moved to other devices by `overrides`.

    The records of a step stay what they were. If they no longer divide into full passes of
    all devices, the micro-batches shrink. Raises `ConfigError` for overrides that would
    change the outcome.
    """
    tree, lines = read_yaml(path)
    keys = [override.partition("=")[0].strip() for override in overrides]
    problems = [
        f"{key}: cannot change when a run is resumed, the outcome would be another; changeable are "
        f"{', '.join(_CHANGEABLE)}"
        for key in keys
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in _CHANGEABLE)
    ]
    moved = int(environ.get("WORLD_SIZE", "1")) > 1 or "strategy.devices" in keys
    before = _section(tree, "strategy")
    if moved and "strategy.name" not in keys and "strategy" not in keys:
        tree["strategy"] = {}  # one device or several: the name follows from the number
    problems += apply_overrides(tree, overrides)
    devices = _section(tree, "strategy").get("devices") or int(environ.get("WORLD_SIZE", "0")) or 1
    if isinstance(devices, int) and devices > 1 and "timeout_seconds" in before:
        _section(tree, "strategy").setdefault("timeout_seconds", before["timeout_seconds"])
    if "train.micro_batch_size" not in keys:
        _fit_micro_batches(tree, devices)
    return validate(tree, environ, lines=lines, source=str(path), problems=problems)


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
