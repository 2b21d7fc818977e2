"""Finished runs of tiny models, made without training: the adapter is random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leantune.bases import load_base
from leantune.checkpoint.adapter import save_trained
from leantune.checkpoint.run_folder import RunFolder
from leantune.config import to_yaml, validate
from leantune.methods import attach
from leantune.models.source import load_tokenizer, resolve_model
from tests.batches import shake


def tiny_run(
    folder: Path, base: Path, *, format: str = "alpaca", template: str = "plain", **sections: Any
) -> RunFolder:
    """A run on `base` whose records had this format and template; `sections` are those of run.yaml."""
    tree: dict[str, Any] = {
        "model": {"name": str(base)},
        "method": {"name": "lora", "rank": 4},
        "data": {"train": "train.jsonl", "template": template, **sections.pop("data", {})},
        **sections,
    }
    config = validate(tree)
    run = RunFolder.create(str(folder), "run", overwrite=False)
    run.records.mkdir()
    run.write_json("data.json", {"format": format, "template": template})
    run.write_config(to_yaml(config))
    source = resolve_model(str(base))
    network = load_base("dense", source)
    attached = attach(config.method.name, network, config.method.model_dump(exclude={"name"}), seed=0)
    shake(attached, 1.0 if config.method.name == "lora" else 0.1)
    target = run.adapter if attached.adapter_files() else run.model
    save_trained(attached, target, load_tokenizer(source), str(base), None)
    return run
