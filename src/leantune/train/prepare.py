"""From a configuration to a run folder that ranks can start from: records, data facts, resolved run.yaml."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from leantune.checkpoint.run_folder import RunFolder
from leantune.config import RunConfig, to_yaml
from leantune.config.edit_checks import chosen_subspaces
from leantune.config.objectives import ClassificationObjective
from leantune.data.jinja_template import JinjaTemplate
from leantune.data.prepare import PreparedData, prepare_data
from leantune.data.show import show_example, show_example_styled
from leantune.errors import ConfigError, DataError
from leantune.models.precision import choose_precision
from leantune.models.source import check_vocabulary, load_config, resolve_model
from leantune.models.vocabulary import describe_tokens, grown_config, load_vocabulary
from leantune.train.assemble import check_positions, device_kind
from leantune.train.build import attach_method
from leantune.train.optimizer import check_optimizer
from leantune.train.prefix_choice import check_prefix
from leantune.train.steps import StepPlan, plan_steps
from leantune.train.trackers import check_trackers

Say = Callable[[str], None]


def prepare_run(config: RunConfig, name: str, say: Say = print, scratch: Path | None = None) -> RunFolder:
    """Read and encode the data, check it against the model, create the run folder. No weights are loaded.

    The folder is the configuration's, or `scratch`. Nothing is created if anything is wrong.
    """
    check_trackers(config.output.trackers)
    check_optimizer(config.train.optimizer.name, {device_kind(config)})
    section = config.model
    source = resolve_model(section.name, section.revision, section.trust_remote_code)
    model_config = load_config(source)
    tokenizer, growth = load_vocabulary(source, section.tokenizer, section.add_tokens)
    if growth is not None:
        model_config = grown_config(model_config, growth, source.name)
        say(describe_tokens(tokenizer, section.add_tokens))
    check_vocabulary(model_config, tokenizer)
    subspaces = chosen_subspaces(config)
    prepared = prepare_data(
        config.data, tokenizer, config.train.seed, objective=config.objective, subspaces=subspaces
    )
    config = _with_classes(config, prepared)
    plan = plan_steps(config.train, len(prepared.train), config.strategy.devices)
    _check_lengths(model_config, prepared)
    _check_method(config, prepared, say)
    _describe(prepared, tokenizer, plan, config.strategy.devices, say)
    output = config.output
    folder = RunFolder.create(str(scratch) if scratch else output.dir, name, output.overwrite)
    try:
        with folder.lock.kept():
            _fill(folder, config, prepared, plan)
    except BaseException:
        folder.discard_unused()
        raise
    return folder


def _with_classes(config: RunConfig, prepared: PreparedData) -> RunConfig:
    """The configuration with the classes of the training records, if it left them open."""
    objective = config.objective
    if not isinstance(objective, ClassificationObjective) or objective.labels is not None:
        return config
    labels = prepared.train.facts.labels
    if len(labels) < 2:
        raise DataError(
            f"data.train: all records have the label {', '.join(labels)}; there must be two classes or more "
            "to tell apart (or name all of them with objective.labels)"
        )
    return config.model_copy(update={"objective": objective.model_copy(update={"labels": tuple(labels)})})


def _check_lengths(model_config: Any, prepared: PreparedData) -> None:
    """Records longer than the positions that the model knows would fail in its first step, or train noise."""
    positions = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    parts = [part for part in (prepared.train, prepared.validation) if part is not None]
    longest = max(int(part.sequence_lengths.max(initial=0)) for part in parts)
    if isinstance(positions, int) and 0 < positions < longest:
        raise ConfigError(
            f"data.max_length: the longest record has {longest} tokens, but the model has {positions} "
            f"positions (max_position_embeddings); set data.max_length to {positions} or less"
        )


def _check_method(config: RunConfig, prepared: PreparedData, say: Say) -> None:
    """Build the model without its weights: what cannot be is told before a run is replaced."""
    precision = choose_precision(config.train.precision, torch.device(device_kind(config)))
    attached = attach_method(config, precision)[1]
    line = check_positions(attached, prepared.train)
    if line is not None:
        say(line)
    check_prefix(config.train, attached)


def _describe(
    prepared: PreparedData, tokenizer: PreTrainedTokenizerBase, plan: StepPlan, devices: int, say: Say
) -> None:
    for line in prepared.report:
        say(line)
    say("an encoded record (what carries loss is marked):")
    if say is print and sys.stdout.isatty():
        Console().print(show_example_styled(prepared.train, tokenizer))
    else:
        say(show_example(prepared.train, tokenizer))
    if prepared.train.targets is not None:
        say(f"its class: {prepared.train.facts.labels[int(prepared.train.targets[0])]}")
    say(
        f"{plan.total_steps} steps of {plan.global_batch_size} records "
        f"({devices} device(s), micro-batches of {plan.micro_batch_size}), "
        f"{plan.steps_per_epoch} a pass over the data"
    )


def _fill(folder: RunFolder, config: RunConfig, prepared: PreparedData, plan: StepPlan) -> None:
    """run.yaml comes last: once it is whole, so is everything that `resume` needs."""
    folder.records.mkdir(exist_ok=True)
    prepared.train.save(folder.records / "train.safetensors")
    facts = {"train": asdict(prepared.train.facts)}
    if prepared.validation is not None:
        prepared.validation.save(folder.records / "validation.safetensors")
        facts["validation"] = asdict(prepared.validation.facts)
    if isinstance(prepared.template, JinjaTemplate):
        folder.template.write_text(prepared.template.source, encoding="utf-8")
    folder.write_json("data.json", {**facts, "format": prepared.format, "template": prepared.template.name})
    batches = {"global_batch_size": plan.global_batch_size, "gradient_accumulation_steps": None}
    resolved = config.model_copy(update={"train": config.train.model_copy(update=batches)})
    folder.write_config(to_yaml(resolved))
