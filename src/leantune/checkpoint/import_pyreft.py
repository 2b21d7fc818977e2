"""A folder that pyreft saved becomes an adapter folder of ours, with the same tensors to the bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leantune.checkpoint.adapter import FINGERPRINT, write_adapter
from leantune.checkpoint.pyreft_folder import OWN, Found, chosen_kind, find_interventions, in_pyreft_order
from leantune.checkpoint.pyreft_payload import kinds_of, parameters_from, read_state, sizes_of
from leantune.config.layers import parse_layers
from leantune.config.positions import CONVENTIONS, parse_position
from leantune.errors import CheckpointError, ConfigError
from leantune.methods import AdapterFiles, attach_saved
from leantune.methods.reft_places import CONFIG_FILE, TENSORS_FILE, Part, Place, saved_config, settings_from
from leantune.models.empty import empty_model
from leantune.models.source import load_config, resolve_model
from leantune.ops.intervention import ACTIVATIONS, CONSTANT


@dataclass(frozen=True)
class Noted:
    """What an export of ours put beside pyreft's own keys: an adapter's configuration and metadata."""

    config: dict[str, Any]
    metadata: dict[str, str]


@dataclass(frozen=True)
class NotStored:
    """What pyreft does not store: what was asked for, else what an export noted, else pyreft's default."""

    position: str
    positions_convention: str
    activation: str
    dropout: float


def import_pyreft(
    folder: Path,
    target: Path,
    *,
    base: str | None = None,
    layers: str | Sequence[int] | None = None,
    position: str | None = None,
    positions_convention: str | None = None,
    kind: str | None = None,
    activation: str | None = None,
    dropout: float | None = None,
) -> list[str]:
    """Write the interventions that pyreft saved in `folder` as an adapter folder; returns lines for the user.

    `base` names the model they were trained on: the adapter then is checked against its configuration.
    `layers` and `kind` are checked against what the folder says, and needed where it does not say. Raises
    `ConfigError` for an option that is missing or wrong, `CheckpointError` for the files.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists already; choose a new folder for the adapter")
    found, saved = find_interventions(folder)
    _check_layers(folder, found, layers, base, saved)
    noted = _noted(folder, saved)
    states = [read_state(item.path) for item in found]
    kind = chosen_kind(found, kinds_of(states[0]), kind)
    told = _not_stored(kind, noted.config, position, positions_convention, activation, dropout)
    parameters = [parameters_from(kind, state, item.path) for item, state in zip(found, states, strict=True)]
    _check_sizes(found, parameters)
    as_noted = position is None  # another position may have other ends
    parts = _noted_parts(folder, found, noted.config) if as_noted else _parts(found, told.position)
    places = [
        Place(item.layer, item.component, part, sizes_of(own)[1], told.position)
        for item, own, part in zip(found, parameters, parts, strict=True)
    ]
    _check_ranks(places)
    tensors = {
        f"{place.name}.{name}": tensor
        for place, own in zip(places, parameters, strict=True)
        for name, tensor in own.items()
    }
    biased = any(name.endswith(".projection_bias") for name in tensors)
    settings = {**asdict(told), "projection_bias": biased}
    in_order = sorted(places, key=lambda place: place.layer)
    config = {**noted.config, **saved_config(kind, in_order, settings)}
    if base is not None:
        config = _fitted(base, config, tensors, folder)
    metadata = {"format": "pt", **noted.metadata}
    if FINGERPRINT in config:
        metadata[FINGERPRINT] = config[FINGERPRINT]
    files = AdapterFiles(CONFIG_FILE, config, TENSORS_FILE, tensors)
    return [*_described(kind, places, told), write_adapter(target, [files], metadata)]


def _described(kind: str, places: Sequence[Place], told: NotStored) -> list[str]:
    ranks, components, layers = (
        ", ".join(map(str, sorted({getattr(place, name) for place in places})))
        for name in ("rank", "component", "layer")
    )
    return [
        f"{kind} rank {ranks}, position {told.position}, at {components} of blocks {layers}",
        f"activation {told.activation}, dropout {told.dropout}, positions {told.positions_convention} "
        "(pyreft stores none of these: name what was different in training)",
    ]


def _check_layers(
    folder: Path, found: Sequence[Found], asked: str | Sequence[int] | None, base: str | None, saved: Any
) -> None:
    if saved is None and (asked is None or base is None):
        raise ConfigError(
            f"{folder} has no config.json (pyreft's trainer saves none in its checkpoints); say what was "
            "trained: --base MODEL --layers '8;19'"
        )
    if asked is None:
        return
    try:
        layers = parse_layers(asked)
    except ValueError as error:
        raise ConfigError(f"--layers: {error}") from error
    there = sorted({item.layer for item in found})
    if layers is None or list(layers) != there:
        raise ConfigError(f"--layers {asked}: the folder has interventions at {';'.join(map(str, there))}")


def _noted(folder: Path, saved: Mapping[str, Any] | None) -> Noted:
    """What an export of ours noted beside pyreft's own keys; empty for a folder of pyreft's."""
    value: Any = (saved or {}).get(OWN)
    if value is None:
        return Noted({}, {})
    try:
        noted = Noted(dict(value["config"]), dict(value["metadata"]))
        settings_from(noted.config)
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: {OWN} in config.json is not as an export writes it") from error
    settings_from(noted.config)
    return noted


def _not_stored(
    kind: str,
    noted: Mapping[str, Any],
    position: str | None,
    convention: str | None,
    activation: str | None,
    dropout: float | None,
) -> NotStored:
    """Raises `ConfigError` for values that cannot be, and if there is no telling the position."""
    if position is None and not noted:
        raise ConfigError(
            "--position: pyreft does not store which tokens were edited, and a guess would go unnoticed; say "
            "what it was in training, such as --position f1+l1"
        )
    told = NotStored(
        position or noted["interventions"][0]["position"],
        convention or noted.get("positions_convention", "standard"),
        activation or noted.get("activation", "linear"),
        noted.get("dropout", 0.0) if dropout is None else dropout,
    )
    try:
        positions = parse_position(told.position)
    except ValueError as error:
        raise ConfigError(f"--position: {error}") from error
    if positions.markers:
        raise ConfigError(
            "--position markers: pyreft knows no markers; expected fN+lM, fN, lM, all or indices"
        )
    _choice("--positions-convention", told.positions_convention, CONVENTIONS)
    _choice("--activation", told.activation, ACTIVATIONS)
    if kind in CONSTANT and told.activation != "linear":
        raise ConfigError(f"--activation: {kind} has none; leave it out")
    if not 0 <= told.dropout < 1:
        raise ConfigError(f"--dropout: {told.dropout} is no share; expected 0 or more, below 1")
    return told


def _choice(flag: str, value: str, known: Any) -> None:
    if value not in known:
        raise ConfigError(f"{flag}: {value!r} is unknown; expected one of {', '.join(known)}")


def _check_sizes(found: Sequence[Found], parameters: Sequence[Mapping[str, Tensor]]) -> None:
    """config.json and the tensors must agree."""
    for item, own in zip(found, parameters, strict=True):
        dim, rank = sizes_of(own)
        said = {"low_rank_dimension": (item.rank, rank), "intervention_dimensions": (item.dim, dim)}
        for name, (expected, actual) in said.items():
            if expected not in (None, actual):
                raise CheckpointError(
                    f"{item.path}: config.json says {name} {expected}, its tensors {actual}"
                )


def _parts(found: Sequence[Found], position: str) -> list[Part]:
    """Two interventions at one place are untied: the first one is that of the first tokens, as in pyreft."""
    counts = Counter((item.layer, item.component) for item in found)
    for (layer, component), count in counts.items():
        if count > 2 or (count == 2 and parse_position(position).parts != ("first", "last")):
            raise CheckpointError(
                f"{component} of layer {layer} has {count} interventions; two would be those of the first "
                f"and of the last tokens, and --position is {position}"
            )
    parts: list[Part] = []
    seen: set[tuple[int, str]] = set()
    for item in found:
        at = (item.layer, item.component)
        parts.append("both" if counts[at] == 1 else "last" if at in seen else "first")
        seen.add(at)
    return parts


def _check_ranks(places: Sequence[Place]) -> None:
    """The interventions for both ends of the prompt have one rank here."""
    ranks: dict[tuple[int, str], int] = {}
    for place in places:
        if ranks.setdefault((place.layer, place.component), place.rank) != place.rank:
            raise CheckpointError(
                f"{place.component} of layer {place.layer}: the interventions for first and last tokens have "
                "other ranks, which untied interventions cannot have here"
            )


def _noted_parts(folder: Path, found: Sequence[Found], noted: Mapping[str, Any]) -> list[Part]:
    """As an export noted them, in its order."""
    saved = in_pyreft_order(noted["interventions"])
    if [(s["layer"], s["component"]) for s in saved] != [(f.layer, f.component) for f in found]:
        raise CheckpointError(f"{folder}: {OWN} in config.json has other places than its representations")
    return [item["part"] for item in saved]


def _fitted(base: str, config: dict[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Any]:
    """The configuration with what it says of its base model, which the tensors must fit."""
    source = resolve_model(base)
    model = empty_model(source, load_config(source), weights=torch.float32)
    attached = attach_saved(CONFIG_FILE, model, config)
    assert attached is not None
    attached.load(tensors, str(folder))
    files = attached.export()
    assert files is not None
    return {**files.config, "base_model_name_or_path": base, "revision": None}
