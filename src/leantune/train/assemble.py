"""Puts the parts of a run together on one rank. The order is law: base, method, placement, optimizer."""

from __future__ import annotations

import importlib
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from leantune.bases import load_base
from leantune.checkpoint.run_folder import RunFolder
from leantune.checkpoint.store import CheckpointStore
from leantune.checkpoint.trained import weights_dtype
from leantune.config.schema import RunConfig
from leantune.data.records import EncodedRecords
from leantune.errors import ConfigError, DataError, ModelError
from leantune.methods import Attached, attach
from leantune.models.source import resolve_model
from leantune.strategies.process import World
from leantune.strategies.stop import StopRequest
from leantune.train.events import Events, peak_memory_gib
from leantune.train.optimizer import Schedule, build_optimizer, build_schedule
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


def uses_bf16(config: RunConfig, device: torch.device) -> bool:
    """Whether this device computes in bf16."""
    return weights_dtype(config.train.precision, device) == torch.bfloat16


def assemble(
    config: RunConfig,
    folder: RunFolder,
    world: World,
    tokenizer: PreTrainedTokenizerBase,
    events: Events,
    stop: StopRequest,
) -> tuple[Run, RunCheckpoints]:
    """Build the model, attach the method, make the optimizer; returns the run and its checkpoints."""
    train_records, validation_records = load_records(folder)
    model, attached = _build_model(config, world)
    check_positions(attached, train_records)
    plan = plan_steps(config.train, len(train_records), config.strategy.devices)
    optimizer = build_optimizer(
        attached.trainable(),
        attached.decay_free(),
        learning_rate=config.train.learning_rate,
        **config.train.optimizer.model_dump(),
    )
    checkpoints = RunCheckpoints(
        CheckpointStore(folder.checkpoints, config.output.keep_checkpoints),
        attached,
        optimizer,
        plan,
        writes=config.output.checkpoints and world.is_main,
        keeps_best=config.eval.keep_best and validation_records is not None,
        say=events.message,
    )
    run = Run(
        world=world,
        model=model,
        attached=attached,
        optimizer=optimizer,
        schedule=_schedule(config, plan),
        sum_over_ranks=importlib.import_module(f"leantune.strategies.{config.strategy.name}").sum_over_ranks,
        train_records=train_records,
        validation_records=validation_records,
        pad_id=_pad_id(tokenizer),
        plan=plan,
        settings=_loop_settings(config, world),
        events=events,
        stop=stop,
        save_checkpoint=checkpoints.save,
        peak_memory_gib=lambda: peak_memory_gib(world.device),
    )
    return run, checkpoints


def attach_method(config: RunConfig, model: PreTrainedModel) -> Attached:
    """Attach the run's method to a frozen model; raises `ModelError` if the model cannot have it."""
    settings = config.method.model_dump(exclude={"name"})
    attached = attach(config.method.name, model, settings, config.train.seed)
    if config.train.activation_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ModelError(
                f"train.activation_checkpointing: {type(model).__name__} does not support it; set it to false"
            )
        # transformers renames the method in version 6.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return attached


def check_positions(attached: Attached, records: EncodedRecords) -> None:
    """A method that edits prompt tokens needs records that have some; raises `DataError` if none has."""
    edited = [attached.num_edited(int(length)) for length in records.prompt_lengths]
    if edited and None not in edited and not any(edited):
        raise DataError(
            f"method {attached.name} edits prompt tokens, but no record has a prompt of two tokens or more "
            "(format text has none); use a format with prompts, or another method"
        )


def load_records(folder: RunFolder) -> tuple[EncodedRecords, EncodedRecords | None]:
    """The encoded records of a run: training and, if there are any, validation."""
    validation = folder.records / "validation.safetensors"
    return (
        EncodedRecords.load(folder.records / "train.safetensors"),
        EncodedRecords.load(validation) if validation.exists() else None,
    )


def _build_model(config: RunConfig, world: World) -> tuple[PreTrainedModel, Attached]:
    section = config.model
    source = resolve_model(section.name, section.revision, section.trust_remote_code)
    dtype = weights_dtype(config.train.precision, world.device)
    model = load_base(
        config.base.name,
        source,
        # Weights that are all trained stay in fp32: going through bf16 would round them.
        dtype=torch.float32 if config.method.name == "full" else dtype,
        device=world.device,
        attention=section.attention,
    )
    return model, attach_method(config, model)


def _schedule(config: RunConfig, plan: StepPlan) -> Schedule:
    section = config.train.schedule
    return build_schedule(
        section.name, config.train.learning_rate, plan.total_steps, plan.warmup_steps, section.floor
    )


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any valid id will do: padding is told by position and no label or attention reaches it."""
    return int(tokenizer.pad_token_id or 0)  # pyright: ignore[reportArgumentType]


def _loop_settings(config: RunConfig, world: World) -> LoopSettings:
    train, section = config.train, config.eval
    return LoopSettings(
        seed=train.seed,
        group_by_length=train.group_by_length,
        max_grad_norm=train.max_grad_norm,
        autocast=uses_bf16(config, world.device),
        eval_every_steps=section.every_steps,
        eval_micro_batch_size=section.micro_batch_size or train.micro_batch_size,
        keep_best=section.keep_best,
        patience=section.early_stop_patience,
        min_delta=section.early_stop_min_delta,
        checkpoint_every_steps=config.output.checkpoint_every_steps,
    )
