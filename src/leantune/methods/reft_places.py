"""Where the interventions of a ReFT method are, and how that is written to reft_config.json and read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from leantune.config.layers import parse_layers
from leantune.config.positions import Positions, parse_position
from leantune.errors import CheckpointError, ModelError
from leantune.ops.intervention import KINDS

CONFIG_FILE = "reft_config.json"
TENSORS_FILE = "reft.safetensors"
FORMAT_VERSION = 2
METHODS = KINDS

Part = Literal["both", "first", "last"]
# Settings that hold for all interventions, with the values of adapters that do not name them.
_SHARED: dict[str, Any] = {
    "positions_convention": "standard",
    "generation": "prompt",
    "dropout": 0.0,
    "activation": "linear",
    "projection_bias": False,
    "subspaces": {},
    "markers": None,
    "train_embeddings": False,
}


@dataclass(frozen=True)
class Place:
    """The place of one intervention. part: both ends of the prompt (tied), or one of them."""

    layer: int
    component: str
    part: Part
    rank: int
    position: str | tuple[int, ...]

    @property
    def name(self) -> str:
        """What its parameters are saved under."""
        return f"{self.layer}.{self.component}.{self.part}"

    @cached_property
    def positions(self) -> Positions:
        """The position, read."""
        return parse_position(self.position)


def resolve_places(groups: Sequence[Mapping[str, Any]], num_layers: int) -> list[Place]:
    """The places of all groups, by layer; raises `ModelError` for a layer or position that cannot be."""
    places: dict[str, Place] = {}
    for group in groups:
        for layer in _layers(group["layers"], num_layers):
            for place in _at_layer(layer, group):
                clash = {place.name, f"{layer}.{place.component}.both"} & places.keys()
                if clash or (place.part == "both" and _any_at(places, layer, place.component)):
                    raise ModelError(
                        f"method.interventions: {place.component} of layer {layer} is named twice; give each "
                        "place one group"
                    )
                places[place.name] = place
    return sorted(places.values(), key=lambda place: place.layer)


def _any_at(places: Mapping[str, Place], layer: int, component: str) -> bool:
    return any((p.layer, p.component) == (layer, component) for p in places.values())


def _layers(value: str | Sequence[int], num_layers: int) -> Sequence[int]:
    try:
        layers = parse_layers(value)
    except ValueError as error:
        raise ModelError(f"method.layers: {error}") from error
    if layers is None:
        return range(num_layers)
    if layers[-1] >= num_layers:
        raise ModelError(
            f"method.layers: layer {layers[-1]} does not exist; the model has {num_layers} layers, "
            f"0 to {num_layers - 1}"
        )
    return layers


def _at_layer(layer: int, group: Mapping[str, Any]) -> list[Place]:
    position = group["position"] if isinstance(group["position"], str) else tuple(group["position"])
    try:
        positions = parse_position(position)
    except ValueError as error:
        raise ModelError(f"method.position: {error}") from error
    if not group["tied"] and not positions.parts:
        raise ModelError(
            f"method.tied: position {position} has no first and last tokens to tell apart; use tied: true"
        )
    parts: Sequence[Part] = ("both",) if group["tied"] else positions.parts
    return [Place(layer, group["component"], part, group["rank"], position) for part in parts]


def saved_config(method: str, places: Sequence[Place], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The content of reft_config.json."""
    return {
        "format": "leantune-reft",
        "format_version": FORMAT_VERSION,
        "method": method,
        "interventions": [
            {
                "layer": place.layer,
                "component": place.component,
                "part": place.part,
                "rank": place.rank,
                "position": place.position,
            }
            for place in places
        ],
        **{key: settings.get(key, default) for key, default in _SHARED.items()},
        "dtype": "float32",
    }


def settings_from(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `attach` that a saved reft_config.json asks for."""
    version = config.get("format_version")
    if config.get("format") != "leantune-reft" or version not in (1, FORMAT_VERSION):
        raise CheckpointError(
            f"reft_config.json: format {config.get('format')!r} version {version!r} is not leantune-reft "
            f"version {FORMAT_VERSION}"
        )
    needed = ("rank", "layers", "position", "tied") if version == 1 else ("method", "interventions")
    absent = [key for key in needed if config.get(key) in (None, [])]
    if absent:
        raise CheckpointError(f"reft_config.json: {absent[0]} is missing; it is no complete adapter")
    shared = {key: config.get(key, default) for key, default in _SHARED.items()}
    if version == 1:  # LoReFT at block outputs, one group
        return {**shared, "method": "loreft", **{key: config[key] for key in needed}}
    if config["method"] not in METHODS:
        raise CheckpointError(
            f"reft_config.json: method {config['method']!r} is unknown; expected one of {', '.join(METHODS)}"
        )
    return {**shared, "method": config["method"], "interventions": _groups(config["interventions"])}


def _groups(saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A group for each layer and component; two parts of one place are one untied group."""
    groups: dict[tuple[int, str], dict[str, Any]] = {}
    for place in saved:
        try:
            at = (place["layer"], place["component"])
            groups[at] = {
                "layers": [place["layer"]],
                "component": place["component"],
                "rank": place["rank"],
                "position": place["position"],
                "tied": place["part"] == "both",
            }
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"reft_config.json: interventions: {place!r} lacks {error}") from error
    return list(groups.values())


def current_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an adapter by today's names; those of version 1 do not say the component."""

    def current(name: str) -> str:
        parts = name.split(".")
        return (
            ".".join([parts[0], "block_output", *parts[1:]])
            if len(parts) == 3 and parts[0].isdigit()
            else name
        )

    return {current(name): tensor for name, tensor in tensors.items()}
