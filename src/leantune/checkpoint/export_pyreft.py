"""An adapter of interventions becomes a folder as pyreft saves it; what pyreft cannot express is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leantune.checkpoint.adapter import read_json, read_tensors
from leantune.checkpoint.atomic import write_folder
from leantune.checkpoint.compare import refuse_different, same_bits
from leantune.checkpoint.place import Place
from leantune.checkpoint.pyreft_folder import CONFIG, FIELDS, OWN, class_of, in_pyreft_order, key_of
from leantune.checkpoint.pyreft_payload import parameters_from, payload_of, read_state, sizes_of
from leantune.config.positions import parse_position
from leantune.errors import CheckpointError
from leantune.methods import adapter_config_files
from leantune.methods.reft_places import (
    CONFIG_FILE,
    TENSORS_FILE,
    current_names,
    resolve_places,
    saved_config,
    settings_from,
)

# What a group of interventions says of its places.
_GROUP = ("layers", "rank", "component", "position", "tied")


def export_pyreft(run: str | Path, target: Path) -> list[str]:
    """Write the ReFT adapter of a run, or of an adapter folder, as pyreft saves one; returns lines to print.

    Every file is read again and compared. Raises `CheckpointError` for an adapter that pyreft cannot express.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists already; choose a new folder for the export")
    folder = _reft_folder(run)
    tensors, metadata = read_tensors(folder / TENSORS_FILE)
    tensors = current_names(tensors)
    config = _current(read_json(folder / CONFIG_FILE), tensors)
    _refuse_inexpressible(folder, config)
    method = str(config["method"])
    places = in_pyreft_order(config["interventions"])
    parameters = [_parameters_at(place, tensors) for place in places]
    keys = _keys(places)
    payloads = {key: payload_of(method, own) for key, own in zip(keys, parameters, strict=True)}
    saved = _pyreft_config(method, places, parameters, keys)
    saved[OWN] = {"config": config, "metadata": dict(metadata)}

    def fill(made: Path) -> None:
        (made / CONFIG).write_text(json.dumps(saved, indent=2) + "\n")
        for (key, payload), own in zip(payloads.items(), parameters, strict=True):
            path = made / f"intkey_{key}.bin"
            torch.save(payload, path)
            again = parameters_from(method, read_state(path), path)
            refuse_different(target, [name for name in own if not same_bits(own[name], again[name])])

    write_folder(target, fill)
    return [
        f"{len(places)} interventions of {class_of(method)}, for position {places[0]['position']}",
        f"pyreft stores neither of these: build its class with act_fn={config['activation']!r}, "
        f"dropout={config['dropout']}, dtype=torch.float32",
        f"saved {target}: {len(tensors)} tensors read back, equal to those of {folder} bit for bit",
    ]


def _reft_folder(run: str | Path) -> Path:
    folder = Place.of(run).adapter
    present = [name for name in adapter_config_files() if folder is not None and (folder / name).is_file()]
    if folder is None or CONFIG_FILE not in present:
        raise CheckpointError(f"{run} is no ReFT adapter (no {CONFIG_FILE}), and pyreft saves nothing else")
    if len(present) > 1:
        raise CheckpointError(
            f"{folder} has {' and '.join(present)}: they were trained together, and pyreft would load the "
            "interventions alone"
        )
    return folder


def _current(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The configuration as it is written today, with what it says of its base model."""
    settings = settings_from(config)
    one = {"component": "block_output", **{key: settings[key] for key in _GROUP if key in settings}}
    groups: Sequence[Mapping[str, Any]] = settings.get("interventions") or [one]
    layers = [int(name.partition(".")[0]) for name in tensors if name.partition(".")[0].isdigit()]
    places = resolve_places(groups, 1 + max(layers, default=-1))
    kept = {key: value for key, value in config.items() if key not in _GROUP}
    return {**kept, **saved_config(settings["method"], places, settings)}


def _refuse_inexpressible(folder: Path, config: Mapping[str, Any]) -> None:
    positions = {str(place["position"]) for place in config["interventions"]}
    ends = all(parse_position(place["position"]).parts for place in config["interventions"])
    reasons = {
        "train_embeddings": "trained embeddings are no interventions",
        "subspaces": "its classes of these interventions edit their whole subspace",
    }
    found = [f"{key}: {reason}" for key, reason in reasons.items() if config[key]]
    if config["generation"] != "prompt":
        found.append(f"generation: {config['generation']}: which tokens are edited is said in each call")
    if len(positions) > 1 or not ends:
        listed = ", ".join(sorted(positions))
        found.append(f"position {listed}: it has fN+lM, fN or lM, the same at all places")
    if found:
        raise CheckpointError(f"{folder} cannot be expressed in pyreft: " + "; ".join(found))


def _parameters_at(place: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{place['layer']}.{place['component']}.{place['part']}."
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if not found:
        raise CheckpointError(f"{TENSORS_FILE} has no tensors {prefix}*, which {CONFIG_FILE} lists")
    return found


def _keys(places: Sequence[Mapping[str, Any]]) -> list[str]:
    keys: list[str] = []
    for place in places:
        first = key_of(place["layer"], place["component"], 0)
        keys.append(key_of(place["layer"], place["component"], 1) if first in keys else first)
    return keys


def _pyreft_config(
    method: str,
    places: Sequence[Mapping[str, Any]],
    parameters: Sequence[Mapping[str, Tensor]],
    keys: Sequence[str],
) -> dict[str, Any]:
    values = [
        {
            "layer": place["layer"],
            "component": place["component"],
            "unit": "pos",
            "max_number_of_units": 1,
            "low_rank_dimension": place["rank"],
        }
        for place in places
    ]
    return {
        "intervention_constant_sources": [True] * len(places),
        "intervention_dimensions": [sizes_of(own)[0] for own in parameters],
        "intervention_types": [class_of(method)] * len(places),
        "mode": "parallel",
        "model_type": None,
        "representations": [[fields.get(name) for name in FIELDS] for fields in values],
        "sorted_keys": list(keys),
    }
