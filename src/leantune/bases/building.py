"""Building a model on a base: without its weights, packed as the base says, knowing where they are.

The order: `build_base` makes the model without weights and lets the base pack its layers; methods and
strategies then work on it; `materialise` gives each rank memory for its own part; `fill` reads into it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from leantune.errors import ModelError
from leantune.models.anatomy import decoder_blocks
from leantune.models.empty import empty_model
from leantune.models.expand import Expansion, check_same_blocks, expanded_config, new_blocks
from leantune.models.packed import PackedLinear
from leantune.models.precision import Precision
from leantune.models.source import ModelSource, load_config
from leantune.models.vocabulary import Growth, check_grown, grown_config, vocabulary_modules
from leantune.models.weights import WeightFiles, WeightMap


class Slot(NamedTuple):
    """Where a weight of the checkpoint goes; `source` is its name there, None for one that is all zeros.

    `rows`: how many rows it has there, if the model may have more.
    """

    name: str
    source: str | None
    module: nn.Module
    attribute: str
    rows: int | None = None


@dataclass
class BuiltBase:
    """A model without memory, packed as its base says, and the way to its weights."""

    model: PreTrainedModel
    slots: list[Slot]
    weights: WeightMap
    notes: list[str]
    expansion: Expansion | None
    growth: Growth | None
    _skeleton: Callable[[], PreTrainedModel]

    def skeleton(self) -> PreTrainedModel:
        """The same model without memory and with layers of its own kind only, as it is saved."""
        return self._skeleton()

    def original(self, name: str) -> Tensor:
        """A weight as the checkpoint has it, by its name in the skeleton."""
        return self.weights.whole(next(slot.source or name for slot in self.slots if slot.name == name))


def build_base(
    name: str,
    source: ModelSource,
    precision: Precision,
    *,
    settings: Mapping[str, Any] | None = None,
    attention: str = "auto",
    expansion: Expansion | None = None,
    growth: Growth | None = None,
) -> BuiltBase:
    """A model whose weights will be stored as the base `name` says; nothing is read but names.

    With an `expansion` it has new blocks; those, and the new ones of a model saved so, stay
    dense. With `growth` it has rows for added tokens. Raises `ModelError` if the model cannot be
    built, has no safetensors, lacks weights or has them in another shape, or cannot have this base.
    """
    config = load_config(source)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"model.name: {source.name} is quantised already (config.json: quantization_config); name the "
            "unquantised model and let `base` quantise it"
        )
    original = empty_model(source, config, weights=precision.weights)
    weights = WeightMap(original, WeightFiles(source))
    asked = config if expansion is None else expanded_config(config, expansion)
    build = functools.partial(
        empty_model,
        source,
        asked if growth is None else grown_config(asked, growth, source.name),
        weights=precision.weights,
        buffers=precision.buffers,
        attention=attention,
    )
    model = build()
    sources = _sources(model, weights, source, expansion)
    if expansion is not None:
        check_same_blocks(original, model, expansion)
    if growth is not None:
        check_grown(original, model, sources)
    blocks = list(decoder_blocks(model))
    leave = [blocks[index] for index in new_blocks(model.config) or ()]
    notes: list[str] = importlib.import_module(f"leantune.bases.{name}").pack(
        model, leave=leave, **(settings or {})
    )
    slots = [Slot(name, place, *_owner(model, name)) for name, place in sources.items()]
    if growth is not None:
        grown = vocabulary_modules(model)
        slots = [slot._replace(rows=growth.before) if slot.module in grown else slot for slot in slots]
        notes = [*notes, growth.describe(model)]
    built = BuiltBase(model, slots, weights, notes, expansion, growth, build)
    _check_shapes(built)
    return built


def _sources(
    model: PreTrainedModel, weights: WeightMap, source: ModelSource, expansion: Expansion | None
) -> dict[str, str | None]:
    """The name in the checkpoint of every weight of the model; tied weights count once."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    original = expansion.names(model) if expansion else _as_it_is
    found: dict[str, str | None] = {}
    missing: list[str] = []
    for aliases in names.values():
        places = [original(alias) for alias in aliases]
        known = [place for place, _ in places if place in weights]
        if not known:
            missing.append(aliases[0])
        else:
            found[aliases[0]] = None if places[0][1] else known[0]
    if missing:
        raise ModelError(
            f"model.name: {source.name} lacks {len(missing)} weights of {type(model).__name__}: "
            f"{', '.join(missing[:5])}; it is not a complete causal language model"
        )
    return found


def _as_it_is(name: str) -> tuple[str, bool]:
    return name, False


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, attribute = name.rpartition(".")
    return model.get_submodule(parent), attribute


def _check_shapes(base: BuiltBase) -> None:
    """Before anything is read; weights that are put together from several tensors are checked after that."""
    with base.weights.files.reading():
        for slot in base.slots:
            if slot.source is not None and base.weights.is_plain(slot.source):
                check_shape(base, slot)


def check_shape(base: BuiltBase, slot: Slot) -> tuple[int, ...]:
    """The shape that a weight must have in the checkpoint; raises `ModelError` if it has another."""
    assert slot.source is not None
    shape, expected = base.weights.shape(slot.source), _expected_shape(slot)
    if shape != expected:
        raise ModelError(
            f"model.name: {base.weights.files.source.name}: {slot.source} is {shape} in the checkpoint, but "
            f"the configuration asks for {expected}; config.json and the weights do not belong together"
        )
    return shape


def _expected_shape(slot: Slot) -> tuple[int, ...]:
    layer = slot.module
    if isinstance(layer, PackedLinear) and slot.attribute == "weight":
        shape = (layer.out_features, layer.in_features)
        return shape[::-1] if layer.transposed else shape
    target: Tensor = getattr(layer, slot.attribute)
    return tuple(target.shape) if slot.rows is None else (slot.rows, *target.shape[1:])
