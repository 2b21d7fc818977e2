"""Puts the parts of a run together on one rank."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from leantune.checkpoint.run_folder import RunFolder
from leantune.checkpoint.store import CheckpointStore
from leantune.config.schema import RunConfig
from leantune.data.records import EncodedRecords
from leantune.errors import ConfigError, DataError
from leantune.methods import Attached
from leantune.models.precision import choose_precision
from leantune.strategies.process import World
from leantune.strategies.stop import StopRequest
from leantune.train.build import build_model
from leantune.train.events import Events, peak_memory_gib
from leantune.train.objectives import build_objective
from leantune.train.optimizer import Schedule, build_optimizer, build_schedule
from leantune.train.prefix_choice import choose_reshuffle
from leantune.train.run import LoopSettings, Run
from leantune.train.saving import RunCheckpoints
from leantune.train.steps import StepPlan, plan_steps


def device_kind(config: RunConfig) -> Literal["cpu", "cuda"]:
    """Where the run computes; raises `ConfigError` if cuda is asked for and there is none."""
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device: cuda, but torch sees no CUDA device; use auto or cpu")
    if config.train.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.train.device


def assemble(
    config: RunConfig,
    folder: RunFolder,
    world: World,
    tokenizer: PreTrainedTokenizerBase,
    events: Events,
    stop: StopRequest,
) -> tuple[Run, RunCheckpoints]:
    """Build the model with its method in place, make the optimizer; returns the run and its checkpoints."""
    train_records, validation_records = load_records(folder)
    built = build_model(config, world)
    check_positions(built.attached, train_records)
    plan = plan_steps(config.train, len(train_records), config.strategy.devices)
    optimizer = build_optimizer(
        built.placement.trained,
        built.attached.decay_free(),
        learning_rate=config.train.learning_rate,
        **config.train.optimizer.model_dump(),
    )
    checkpoints = RunCheckpoints(
        CheckpointStore(folder.checkpoints, config.output.keep_checkpoints),
        built.placement,
        optimizer,
        plan,
        saves=config.output.checkpoints,
        writes=config.output.checkpoints and world.is_main,
        keeps_best=config.eval.keep_best and validation_records is not None,
        say=events.message,
    )
    run = Run(
        world=world,
        model=built.model,
        base=built.base,
        attached=built.attached,
        objective=build_objective(config.objective, config.train.loss_chunk_tokens),
        placement=built.placement,
        description=built.lines,
        optimizer=optimizer,
        schedule=_schedule(config, plan),
        train_records=train_records,
        validation_records=validation_records,
        pad_id=_pad_id(tokenizer),
        plan=plan,
        settings=_loop_settings(config, world, choose_reshuffle(config.train, plan, built.attached)),
        events=events,
        stop=stop,
        save_checkpoint=checkpoints.save,
        peak_memory_gib=lambda: peak_memory_gib(world.device),
    )
    return run, checkpoints


def check_positions(attached: Attached, records: EncodedRecords) -> str | None:
    """A method that edits prompt tokens needs records that have some; raises `DataError` if none has.

    Returns a line if only some have.
    """
    if attached.markers is not None and (records.marked is None or not records.marked.any()):
        opening, closing = attached.markers
        raise DataError(
            f"method {attached.name} edits what stands between {opening!r} and {closing!r} (data.markers), "
            "but no record has such a span in its prompt; mark some, or choose another method.position"
        )
    lengths, counts = np.unique(records.prompt_lengths, return_counts=True)
    edited = [attached.num_edited(int(length)) for length in lengths]
    if None in edited:
        return None
    if edited and not any(edited):
        raise DataError(
            f"method {attached.name} edits no token of any record: its positions are not in the prompts, of "
            f"{lengths.min()} to {lengths.max()} tokens. fN and lM take at most half of a prompt, so none of "
            "one token; text has no prompt. Use another method.position, or a format with prompts"
        )
    left = sum(int(count) for count, number in zip(counts, edited, strict=True) if number == 0)
    return f"{left} of {len(records)} records have no prompt token at method.position" if left else None


def load_records(folder: RunFolder) -> tuple[EncodedRecords, EncodedRecords | None]:
    """The encoded records of a run: training and, if there are any, validation."""
    validation = folder.records / "validation.safetensors"
    return (
        EncodedRecords.load(folder.records / "train.safetensors"),
        EncodedRecords.load(validation) if validation.exists() else None,
    )


def _schedule(config: RunConfig, plan: StepPlan) -> Schedule:
    section = config.train.schedule
    return build_schedule(
        section.name, config.train.learning_rate, plan.total_steps, plan.warmup_steps, section.floor
    )


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any valid id will do: padding is told by position and no label or attention reaches it."""
    return int(tokenizer.pad_token_id or 0)  # pyright: ignore[reportArgumentType]


def _loop_settings(config: RunConfig, world: World, reshuffle: Literal["records", "windows"]) -> LoopSettings:
    train, section = config.train, config.eval
    return LoopSettings(
        seed=train.seed,
        group_by_length=train.group_by_length,
        max_grad_norm=train.max_grad_norm,
        precision=choose_precision(train.precision, world.device),
        eval_every_steps=section.every_steps,
        eval_micro_batch_size=section.micro_batch_size or train.micro_batch_size,
        keep_best=section.keep_best,
        patience=section.early_stop_patience,
        min_delta=section.early_stop_min_delta,
        checkpoint_every_steps=config.output.checkpoint_every_steps,
        reshuffle=reshuffle,
    )
