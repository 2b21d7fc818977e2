"""Before the first step of several ranks: they are about to do the same, or the run does not start."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from leantune.config.load import to_tree
from leantune.config.schema import RunConfig
from leantune.data.records import EncodedRecords
from leantune.errors import LaunchError
from leantune.strategies.process import gather_objects
from leantune.train.run import Run

# What is compared, and what the user should look at if it differs.
_ADVICE = {
    "settings": "give the same run file and overrides on all machines",
    "records": "do all machines read the same data files, with the same tokenizer?",
    "step": "do all machines see the same checkpoints of the run folder?",
    "weights": "do all machines have the same model files and package versions?",
}
# Machines may keep the model and the data in other places; what is in them is compared instead.
_COMPARED_SECTIONS = ("method", "base", "strategy", "train", "eval")


def check_agreement(config: RunConfig, run: Run, step: int) -> None:
    """Raise the same `LaunchError` on every rank, naming the ranks that differ from rank 0 and in what."""
    if run.world.size == 1:
        return
    mine = {
        "settings": _settings_digest(config),
        "records": [_records_digest(run.train_records), _records_digest(run.validation_records)],
        "step": step,
        "weights": weights_checksum(run.model),
    }
    everyone = gather_objects(mine)
    for what, advice in _ADVICE.items():
        differing = [rank for rank, facts in enumerate(everyone) if facts[what] != everyone[0][what]]
        if differing:
            ranks = f"rank{'s' if len(differing) > 1 else ''} {', '.join(map(str, differing))}"
            raise LaunchError(f"before the first step {ranks} and rank 0 differ in their {what}; {advice}")


@torch.no_grad()
def weights_checksum(model: nn.Module) -> int:
    """One number, from their bits, for all parameters that every rank holds whole."""
    checksum = 0
    for index, parameter in enumerate(model.parameters()):
        if isinstance(parameter, DTensor):
            continue
        flat = parameter.detach().contiguous().flatten().view(torch.uint8)
        words = flat.view(torch.int32) if flat.numel() % 4 == 0 else flat
        checksum = (checksum * 31 + index + int(words.sum(dtype=torch.int64))) % (2**62)
    return checksum


def _settings_digest(config: RunConfig) -> str:
    tree: dict[str, Any] = to_tree(config)
    compared: dict[str, Any] = {key: tree[key] for key in _COMPARED_SECTIONS}
    compared["add_tokens"] = list(config.model.add_tokens)
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()


def _records_digest(records: EncodedRecords | None) -> str | None:
    if records is None:
        return None
    digest = hashlib.sha256()
    for array in (records.tokens, records.supervised, records.offsets, records.prompt_lengths):
        digest.update(array.tobytes())
    return digest.hexdigest()
