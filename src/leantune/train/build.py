"""The model of a run on one rank. The order is law: base, method, placement, memory, weights."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from leantune.bases import BuiltBase, build_base, fill
from leantune.config.objectives import ClassificationObjective, RewardObjective
from leantune.config.schema import RunConfig
from leantune.errors import ConfigError
from leantune.methods import Attached, attach, join
from leantune.methods.head import attach as attach_head
from leantune.models.empty import materialise
from leantune.models.expand import Expansion, check_identity, new_blocks, plan_expansion
from leantune.models.precision import Precision, choose_precision
from leantune.models.recompute import recompute_blocks
from leantune.models.source import ModelSource, load_config, resolve_model
from leantune.models.vocabulary import Growth, load_vocabulary
from leantune.strategies.placement import Placement
from leantune.strategies.process import World


@dataclass(frozen=True)
class BuiltModel:
    """A model that is ready to train, and lines that say what it is made of."""

    model: PreTrainedModel
    base: BuiltBase
    attached: Attached
    placement: Placement
    lines: list[str]


def build_model(config: RunConfig, world: World) -> BuiltModel:
    """Build, shard and load the model; a collective, every rank calls it."""
    precision = choose_precision(config.train.precision, world.device)
    base, attached = attach_method(config, precision)
    frozen = {name for name, _ in _named(base)}
    strategy = config.strategy
    placement: Placement = importlib.import_module(f"leantune.strategies.{strategy.name}").place(
        base.model, attached.trainable(), world, **_placing(config, attached, frozen, precision)
    )
    materialise(base.model, world.device, placement.parameters_device())
    targets = attached.row_norm_targets()
    norms = fill(base, world.device, norms_of=list(targets.values()))
    for name, module in targets.items():
        attached.set_row_norms(name, *norms[module])
    placement.take(attached.trainable())
    if base.expansion is not None:
        check_identity(base.model, base.expansion)
        placement.end_passes()
    lines = [*base.notes, *attached.describe(), *placement.describe()]
    return BuiltModel(base.model, base, attached, placement, lines)


def attach_method(config: RunConfig, precision: Precision) -> tuple[BuiltBase, Attached]:
    """The base with the run's method on it, still without memory; raises `ModelError` if that cannot be."""
    section, method, train = config.model, config.method, config.train
    source = resolve_model(section.name, section.revision, section.trust_remote_code)
    base = build_base(
        config.base.name,
        source,
        precision,
        settings=config.base.model_dump(exclude={"name"}),
        attention=section.attention,
        expansion=_expansion(config, load_config(source)),
        growth=_growth(config, source),
    )
    attached = attach(method.name, base.model, _method_settings(config), train.seed)
    if isinstance(config.objective, ClassificationObjective | RewardObjective):
        labels = getattr(config.objective, "labels", None)
        attached = join([*attached.parts(), attach_head(base.model, seed=train.seed, labels=labels)])
    with torch.no_grad():
        pinned = attached.pinned()
        for name, parameter in attached.trainable().items():
            if name not in pinned:
                parameter.data = parameter.data.to(precision.trained)
    if train.activation_checkpointing:
        recompute_blocks(base.model, train.checkpoint_every_blocks, train.activation_offload)
    return base, attached


def _method_settings(config: RunConfig) -> dict[str, Any]:
    """The keys of the method section; what edits between markers is told which."""
    settings = config.method.model_dump(exclude={"name"})
    for section in settings.get("parts", (settings,)):
        if "position" in section:
            section["markers"] = config.data.markers
    return settings


def _expansion(config: RunConfig, model_config: Any) -> Expansion | None:
    """The new blocks that the method asks for; none if the model was expanded before."""
    blocks = getattr(config.method, "blocks", None)
    present = new_blocks(model_config)
    if blocks is None or (present is not None and len(present) == blocks):
        return None
    if present is not None:
        raise ConfigError(
            f"method.blocks: {blocks}, but {config.model.name} was expanded by {len(present)} blocks "
            f"already; set method.blocks to {len(present)} to train those"
        )
    return plan_expansion(model_config, blocks)


def _growth(config: RunConfig, source: ModelSource) -> Growth | None:
    """The rows that added tokens need."""
    section = config.model
    return load_vocabulary(source, section.tokenizer, section.add_tokens)[1] if section.add_tokens else None


def _named(base: BuiltBase) -> list[tuple[str, Any]]:
    """The parameters that come from the checkpoint."""
    meta = torch.device("meta")
    return [(name, p) for name, p in base.model.named_parameters() if p.device == meta]


def _placing(
    config: RunConfig, attached: Attached, from_checkpoint: set[str], precision: Precision
) -> dict[str, Any]:
    """What the strategy is told: its own settings, and which trained parameters are an adapter's."""
    if config.strategy.name != "fsdp":
        return {}
    strategy = config.strategy
    new = frozenset(attached.trainable()) - from_checkpoint
    trains_weights = len(attached.trainable()) > len(new)
    return {
        **strategy.model_dump(exclude={"name", "devices", "nodes", "timeout_seconds"}),
        "devices_per_node": strategy.devices // strategy.nodes,
        "new_parameters": new,
        "gather_dtype": precision.compute if trains_weights else None,
        "pinned": frozenset(attached.pinned()),
    }
