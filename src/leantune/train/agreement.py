"""Several ranks do the same: checked before the first step, or the run does not start, and at every step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from leantune.config.load import to_tree
from leantune.config.schema import RunConfig
from leantune.data.records import EncodedRecords
from leantune.errors import LaunchError, NumericsError
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
_COMPARED_SECTIONS = ("method", "objective", "base", "strategy", "train", "eval")


def check_agreement(config: RunConfig, run: Run, step: int) -> None:
    """Raise the same `LaunchError` on every rank, naming the ranks that differ from rank 0 and in what."""
    if run.world.size == 1:
        return
    mine = {
        "settings": _settings_digest(config),
        "records": [records_digest(run.train_records), records_digest(run.validation_records)],
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


@torch.no_grad()
def drift_terms(parameters: Sequence[Tensor]) -> Tensor:
    """What ranks add up to see whether these parameters are equal on all of them, float32 [8].

    The four bytes c of a checksum of their bits, and each c²: sums of so small whole numbers are exact for
    up to 256 ranks, and all c are equal if and only if ranks · Σ c² = (Σ c)². No rank waits for a number.
    """
    device = parameters[0].device
    words = [
        p.detach().contiguous().view(torch.int32 if p.element_size() == 4 else torch.int16)
        for p in parameters
    ]
    # An odd factor loses no bit of a sum, not even the last sign.
    sums = [(2 * index + 1) * word.sum(dtype=torch.int64).to(device) for index, word in enumerate(words)]
    total = torch.stack(sums).sum()
    checksum = torch.stack([(total >> shift) & 255 for shift in (0, 8, 16, 24)]).float()
    return torch.cat([checksum, checksum.square()])


def check_drift(summed: Tensor, world_size: int, step: int) -> None:
    """Raise the same `NumericsError` on every rank if `drift_terms`, summed over ranks, show a difference."""
    checksum, squares = summed.double().chunk(2)
    if not torch.equal(world_size * squares, checksum.square()):
        raise NumericsError(
            f"step {step}: the trained parameters differ between the {world_size} ranks. Nothing was updated "
            "in this step. Resume from the last checkpoint; if it happens again, look for a device that "
            "computes wrongly, or for code that changes parameters on one rank"
        )


def _settings_digest(config: RunConfig) -> str:
    tree: dict[str, Any] = to_tree(config)
    compared: dict[str, Any] = {key: tree[key] for key in _COMPARED_SECTIONS}
    compared["add_tokens"] = list(config.model.add_tokens)
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()


def records_digest(records: EncodedRecords | None) -> str | None:
    """A digest of what records are trained on; None if there are none."""
    if records is None:
        return None
    digest = hashlib.sha256()
    always = (records.tokens, records.supervised, records.offsets, records.prompt_lengths, records.sample_ids)
    for array in (*always, records.targets, records.marked, records.subspaces):
        digest.update(b"absent" if array is None else array.tobytes())
    return digest.hexdigest()
