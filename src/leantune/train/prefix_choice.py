"""Whether a run keeps the output of its frozen prefix, where, and how its epochs are shuffled for that."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import transformers
from torch import Tensor

from leantune.checkpoint.run_folder import RunFolder
from leantune.config.load import to_tree
from leantune.config.schema import RunConfig, TrainSection
from leantune.data.batches import MicroBatch, Window, cut_window, deal
from leantune.data.records import EncodedRecords
from leantune.errors import ConfigError
from leantune.methods import Attached
from leantune.models.anatomy import decoder_blocks
from leantune.models.expand import block_output
from leantune.models.prefix import FrozenPrefix, random_parts
from leantune.models.source import fingerprint
from leantune.strategies.process import barrier, gather_objects
from leantune.train.agreement import records_digest
from leantune.train.meters import available_memory
from leantune.train.prefix import PrefixCache
from leantune.train.prefix_store import DiskStore, MemoryStore, Store, prepare_folder, used_bytes
from leantune.train.run import Run
from leantune.train.steps import StepPlan

_GIB = 2**30
_KEY = "train.cache_frozen_prefix"


class _Trial(NamedTuple):
    """What the prefix puts out for one micro-batch, and why it cannot be given back (None: it can)."""

    hidden_BTd: Tensor
    reason: str | None


def choose_reshuffle(
    train: TrainSection, plan: StepPlan, attached: Attached
) -> Literal["records", "windows"]:
    """What each epoch draws anew. `auto` does not ask whether the prefix is kept: both are the same run."""
    if train.reshuffle != "auto":
        return train.reshuffle
    fixed = _has_epochs(plan) and _is_large(attached) and _unfit(attached) is None
    return "windows" if fixed else "records"


def check_prefix(train: TrainSection, attached: Attached) -> None:
    """Raise `ConfigError` if the prefix is to be kept and cannot; the model needs no weights for that."""
    reason = _unfit(attached)
    if train.cache_frozen_prefix in ("memory", "disk") and reason is not None:
        raise _refused(train.cache_frozen_prefix, reason)


def open_prefix(run: Run, config: RunConfig, folder: RunFolder) -> tuple[PrefixCache, str]:
    """What micro-batches go through, and a line that says what was chosen; a collective.

    Call it with all parameters in place. Raises `ConfigError` if the prefix is to be kept and cannot.
    """
    mode = config.train.cache_frozen_prefix
    reason = f"{_KEY} is off" if mode == "off" else _unfit(run.attached)
    if reason is None and mode == "auto":
        reason = _not_worth(run)
    if reason is not None:
        return _without(mode, reason)
    prefix = FrozenPrefix(run.model, run.attached.frozen_blocks())
    trial = _try(run, prefix)
    needed, limit = _needed_bytes(run, trial.hidden_BTd), _limit(config, folder)
    reason = trial.reason
    if mode == "auto" and reason is None and needed > limit:
        reason = (
            f"it would take {needed / _GIB:.2f} GiB a rank where {limit / _GIB:.2f} GiB may be used; raise "
            f"train.prefix_cache_gib, or set {_KEY} to memory (a part of it is kept) or disk"
        )
    reason = next((other for other in gather_objects(reason) if other is not None), None)
    if reason is not None:
        return _without(mode, reason)
    store = _open_store(run, config, folder, limit)
    whole = run.settings.reshuffle == "windows"
    return PrefixCache(prefix, store, whole), _chosen(run, store, needed, whole)


def _without(mode: str, reason: str) -> tuple[PrefixCache, str]:
    if mode in ("memory", "disk"):
        raise _refused(mode, reason)
    return PrefixCache(), f"frozen prefix: not kept, because {reason}"


def _refused(mode: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{_KEY}: {mode}, but {reason}; set it to off, or train upper layers only (method.layers) of a model "
        "without dropout"
    )


def _unfit(attached: Attached) -> str | None:
    """Why the prefix cannot be kept, as far as the model shows without computing."""
    num_blocks = attached.frozen_blocks()
    if num_blocks == 0:
        return "no decoder block lies below everything that is trained"
    parts = random_parts(attached.model, num_blocks)
    if parts:
        return f"the blocks below what is trained drop values at random ({', '.join(parts[:3])})"
    return None


def _not_worth(run: Run) -> str | None:
    """Why `auto` leaves it."""
    if not _has_epochs(run.plan):
        return "no record comes twice"
    if not _is_large(run.attached):
        total = len(decoder_blocks(run.model))
        return f"{run.attached.frozen_blocks()} of {total} blocks are frozen, less than a quarter"
    if run.settings.reshuffle == "records":
        return (
            "train.reshuffle is records, so micro-batches change and losses would be equal to rounding only"
        )
    return None


def _has_epochs(plan: StepPlan) -> bool:
    return plan.total_steps > plan.steps_per_epoch


def _is_large(attached: Attached) -> bool:
    return 4 * attached.frozen_blocks() >= len(decoder_blocks(attached.model))


@torch.no_grad()
def _try(run: Run, prefix: FrozenPrefix) -> _Trial:
    """Send this rank's first micro-batch through with and without the prefix, and compare bit by bit."""
    window = run.window(0)
    mine = deal(len(window.chunks), run.world.rank, run.world.size)
    batch = run.micro_batch(window, mine[0], 0) if mine else run.idle_batch(window)
    was_training = run.model.training
    run.model.eval()
    with prefix.capturing() as captured:
        plain = _leaving(run, batch)
    reason = prefix.obstacle
    if reason is None:
        with prefix.replaying(captured[0]):
            replayed = _leaving(run, batch)
        if not torch.equal(plain, replayed):
            reason = "hidden states without the prefix differ from those with it"
    run.placement.end_passes()
    run.model.train(was_training)
    return _Trial(captured[0], reason)


def _leaving(run: Run, batch: MicroBatch) -> Tensor:
    """The hidden states that leave the last block."""
    seen: list[Tensor] = []
    last = [*decoder_blocks(run.model).values()][-1]
    handle = last.register_forward_hook(
        lambda _block, _args, output: seen.append(block_output(output).clone())
    )
    try:
        with run.objective.sums(run.attached, batch, run.settings.precision):
            return seen[-1]
    finally:
        handle.remove()


def _needed_bytes(run: Run, hidden_BTd: Tensor) -> int:
    """What all micro-batches that this rank computes will take, as their hidden states are like these."""
    steps = min(run.plan.steps_per_epoch, run.plan.total_steps)
    world = run.world
    tokens = 0
    for window in map(run.window, range(steps)):
        if run.settings.reshuffle == "records":  # each record comes to each rank sooner or later
            tokens += window.total_tokens
        else:
            tokens += _tokens(run.train_records, window, world.rank, world.size)
    records = run.validation_records
    if records is not None:
        window = cut_window(records, torch.arange(len(records)).numpy(), run.settings.eval_micro_batch_size)
        tokens += _tokens(records, window, world.rank, world.size)
    return tokens * hidden_BTd.shape[-1] * hidden_BTd.element_size()


def _tokens(records: EncodedRecords, window: Window, rank: int, world_size: int) -> int:
    """Tokens, with padding, of a rank's micro-batches of a window."""
    lengths = records.sequence_lengths.reshape(len(records), -1)
    mine = (window.chunks[index] for index in deal(len(window.chunks), rank, world_size))
    return sum(int(lengths[chunk].max()) * lengths[chunk].size for chunk in mine)


def _limit(config: RunConfig, folder: RunFolder) -> int:
    """Bytes that one rank may take: its share of what the machine gives."""
    gib = config.train.prefix_cache_gib
    if gib is not None:
        total = int(gib * _GIB)
    elif config.train.cache_frozen_prefix == "disk":
        total = shutil.disk_usage(folder.path).free // 4
    else:
        total = available_memory() // 4
    return total // _ranks_on_node(config)


def _ranks_on_node(config: RunConfig) -> int:
    return config.strategy.devices // getattr(config.strategy, "nodes", 1)


def _open_store(run: Run, config: RunConfig, folder: RunFolder, limit: int) -> Store:
    if config.train.cache_frozen_prefix != "disk":
        return MemoryStore(limit)
    key = _key(run, config)
    place = _folder_of_machine(run, folder) / key
    if run.world.local_rank == 0:
        prepare_folder(place.parent, key)
    barrier()
    return DiskStore(place, key, limit, used_bytes(place) // _ranks_on_node(config))


def _folder_of_machine(run: Run, folder: RunFolder) -> Path:
    """Where the ranks of this machine keep files; machines that share the run folder have one each."""
    return folder.prefix / f"from-rank-{run.world.rank - run.world.local_rank}"


def _key(run: Run, config: RunConfig) -> str:
    """A digest of everything that decides about the bits of what is kept."""
    tree, settings, device = to_tree(config), run.settings, run.world.device
    files = set(run.base.weights.files.path_of.values())
    facts = {
        "sections": [tree[name] for name in ("model", "base", "method")],
        "model": fingerprint(run.model.config),
        "files": sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files),
        "attention": run.model.config._attn_implementation,
        "blocks": run.attached.frozen_blocks(),
        "records": [records_digest(run.train_records), records_digest(run.validation_records)],
        "batches": [run.plan.global_batch_size, run.plan.micro_batch_size, settings.eval_micro_batch_size],
        "order": [settings.seed, settings.group_by_length, settings.reshuffle],
        "precision": settings.precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else torch.get_num_threads(),
        "machine": [platform.processor(), torch.get_float32_matmul_precision()],
        "strategy": config.strategy.name,
        "versions": [torch.__version__, transformers.__version__, metadata.version("leantune")],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _chosen(run: Run, store: Store, needed: int, whole: bool) -> str:
    blocks = f"{run.attached.frozen_blocks()} of {len(decoder_blocks(run.model))} blocks"
    place = "memory" if isinstance(store, MemoryStore) else "files"
    line = (
        f"frozen prefix: {blocks} are computed once, their output is kept in {place} "
        f"({needed / _GIB:.2f} GiB a rank, at most {store.limit / _GIB:.2f})"
    )
    if needed > store.limit:
        line += "; what does not fit is computed each time"
    if not whole:
        line += "; train.reshuffle is records, so losses are those without it up to rounding"
    return line
