"""What a pyreft folder says about its interventions: where they are, of which class, in which file."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from leantune.checkpoint.pyreft_payload import read_state
from leantune.errors import CheckpointError, ConfigError
from leantune.models.anatomy import COMPONENTS
from leantune.ops.intervention import KINDS

CONFIG = "config.json"
OWN = "leantune"  # the key of config.json with what pyreft does not store
# A representation is saved as a list of these; older versions end it earlier.
FIELDS = (
    "layer",
    "component",
    "unit",
    "max_number_of_units",
    "low_rank_dimension",
    "intervention_type",
    "intervention",
    "subspace_partition",
    "group_key",
    "intervention_link_key",
    "moe_key",
    "source_representation",
    "hidden_source_representation",
    "latent_dim",
)
_DEFAULTS = {"unit": "pos", "max_number_of_units": 1}
_CHECKPOINT = "intervenable_model"  # where the trainer of pyreft saves, without a config.json
_MODEL_WEIGHTS = "pytorch_model.bin"
# Both key styles: dots until February 2025, then underscores, also within a path to a module.
_KEY = re.compile(r"(?:layer[._](\d+)[._])?comp[._](.+)[._]unit[._]pos[._]nunit[._]1#(\d+)")
_PATH = re.compile(r"(?:\w+_)?(?:layers|layer|h|blocks)\[(\d+)\]_(?:(\w+)_)?(input|output)")
_MODULES = {
    ("", "output"): "block_output",
    ("", "input"): "block_input",
    **{(name, "output"): "attention_output" for name in ("self_attn", "attn", "attention", "self_attention")},
    ("mlp", "output"): "mlp_output",
    ("mlp_act_fn", "output"): "mlp_activation",
    ("mlp_act", "output"): "mlp_activation",
}


@dataclass(frozen=True)
class Found:
    """One intervention of a folder. kind, rank and dim are None where the folder does not say."""

    layer: int
    component: str
    path: Path
    kind: str | None = None
    rank: int | None = None
    dim: int | None = None


def class_of(kind: str) -> str:
    """How config.json spells pyreft's class of this kind."""
    return f"<class 'pyreft.interventions.{kind.capitalize()}Intervention'>"


def key_of(layer: int, component: str, count: int) -> str:
    """The key of the `count`-th intervention at a place, in today's style."""
    return f"layer_{layer}_comp_{component}_unit_pos_nunit_1#{count}"


def in_pyreft_order(interventions: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Saved places as pyreft's scripts order them: all layers, then for the last tokens all layers again."""
    return sorted(interventions, key=lambda place: (place["part"] == "last", place["layer"]))


def find_interventions(folder: Path) -> tuple[list[Found], dict[str, Any] | None]:
    """The interventions of a pyreft folder, in its order, and its config.json (None: there is none).

    `folder` may also be a checkpoint of pyreft's trainer. Raises `CheckpointError` for what cannot be read,
    lacks a file or has one too many, or has no counterpart here.
    """
    place = _place_of(folder)
    _refuse_model_weights(place)
    config = _config_of(folder, place)
    files = {path.name for path in place.glob("intkey_*.bin")}
    found = _from_names(place, files) if config is None else _from_config(place, config, files)
    extra = sorted(files - {item.path.name for item in found})
    if extra:
        raise CheckpointError(f"{place} has {', '.join(extra)}, which its {CONFIG} does not list")
    return found, config


def _place_of(folder: Path) -> Path:
    """The folder with the tensors: the one that is named, or that of a trainer's checkpoint in it."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; expected one that pyreft saved")
    for place in (folder, folder / _CHECKPOINT):
        if any(place.glob("intkey_*.bin")):
            return place
    checkpoints = sorted(path.parent.name for path in folder.glob(f"*/{_CHECKPOINT}"))
    hint = f"; name one of its checkpoints: {', '.join(checkpoints)}" if checkpoints else ""
    raise CheckpointError(f"{folder} has no intkey_*.bin, as pyreft saves them{hint}")


def _refuse_model_weights(place: Path) -> None:
    path = place / _MODEL_WEIGHTS
    names = sorted(read_state(path)) if path.is_file() else []
    if names:
        raise CheckpointError(
            f"{path} has {len(names)} trained weights of the model itself ({', '.join(names[:3])}), which an "
            "adapter of interventions cannot hold; only the interventions can be imported, without this file"
        )


def _config_of(folder: Path, place: Path) -> dict[str, Any] | None:
    path = next((p / CONFIG for p in (place, folder) if (p / CONFIG).is_file()), None)
    if path is None:
        return None
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    named = cast("dict[str, Any]", config if isinstance(config, dict) else {})
    if not isinstance(named.get("representations"), list):
        raise CheckpointError(f"{path} is not pyreft's: it has no list of representations")
    return named


def _from_names(place: Path, files: set[str]) -> list[Found]:
    found: list[tuple[int, Found]] = []
    for name in files:
        match = _KEY.fullmatch(name.removeprefix("intkey_").removesuffix(".bin"))
        if match is None:
            raise CheckpointError(f"{place / name}: its name is no key of an intervention at token positions")
        layer, component = _place(match[1] and int(match[1]), match[2], name)
        found.append((int(match[3]), Found(layer, component, place / name)))
    return [item for _, item in sorted(found, key=lambda pair: (pair[0], pair[1].layer))]


def _from_config(place: Path, config: Mapping[str, Any], files: set[str]) -> list[Found]:
    representations: list[Any] = config["representations"]
    classes = _per_intervention(config, "intervention_types", len(representations), place)
    dims = _per_intervention(config, "intervention_dimensions", len(representations), place)
    counts: Counter[str] = Counter()
    found: list[Found] = []
    for value, spelled, dim in zip(representations, classes, dims, strict=True):
        fields = _fields(value, place)
        key = "" if "." in fields["component"] else f"layer.{fields['layer']}."
        key += f"comp.{fields['component']}.unit.pos.nunit.1"
        name = _file_of(place, f"intkey_{key}#{counts[key]}.bin", files)
        counts[key] += 1
        layer, component = _place(fields["layer"], fields["component"], f"{place / CONFIG}")
        kind = None if spelled is None else _kind(str(spelled), place)
        found.append(Found(layer, component, place / name, kind, fields["low_rank_dimension"], dim))
    return found


def _per_intervention(config: Mapping[str, Any], key: str, count: int, place: Path) -> Sequence[Any]:
    """A list of the config with one value for each intervention; all None if there is no such list."""
    values: Any = config.get(key)
    if values is None:
        return [None] * count
    if not isinstance(values, list) or len(cast("list[Any]", values)) != count:
        raise CheckpointError(f"{place / CONFIG}: {key} has not {count} values, one for each representation")
    return cast("list[Any]", values)


def _fields(value: Any, place: Path) -> dict[str, Any]:
    """The fields of one representation; refused if one of them changes what the intervention computes."""
    if isinstance(value, list) and 2 <= len(cast("list[Any]", value)) <= len(FIELDS):
        fields: dict[str, Any] = dict(zip(FIELDS, cast("list[Any]", value), strict=False))
    elif isinstance(value, dict) and cast("dict[str, Any]", value).keys() <= set(FIELDS):
        fields = {"layer": 0, "component": "block_output", **cast("dict[str, Any]", value)}
    else:
        raise CheckpointError(
            f"{place / CONFIG}: representation {value!r} is no list of 2 to {len(FIELDS)} values; expected "
            f"{', '.join(FIELDS)}"
        )
    fields = {**dict.fromkeys(FIELDS), **_DEFAULTS, **fields}
    if not isinstance(fields["component"], str):
        raise CheckpointError(f"{place / CONFIG}: component {fields['component']!r} is no name")
    plain = {**_DEFAULTS, **dict.fromkeys(FIELDS[5:])}
    for name, expected in plain.items():
        if fields[name] != expected:
            raise CheckpointError(
                f"{place / CONFIG}: {name} is {fields[name]!r}; only {expected!r} has a counterpart here"
            )
    return fields


def _file_of(place: Path, dotted: str, files: set[str]) -> str:
    today = f"{dotted.removesuffix('.bin').replace('.', '_')}.bin"
    for name in (today, dotted):
        if name in files:
            return name
    raise CheckpointError(f"{place}: {today} is missing (or {dotted}, as older versions name it)")


def _place(layer: Any, component: str, where: str) -> tuple[int, str]:
    """(layer, component) in our terms, of a component's name or of a path to a module."""
    if component in COMPONENTS and isinstance(layer, int):
        return layer, component
    match = _PATH.fullmatch(component.replace(".", "_"))
    ours = _MODULES.get((match[2] or "", match[3])) if match else None
    if match is None or ours is None:
        raise CheckpointError(
            f"{where}: {component!r} of layer {layer!r} has no counterpart here; a layer is edited at "
            f"{', '.join(COMPONENTS)}"
        )
    return int(match[1]), ours


def _kind(spelled: str, place: Path) -> str:
    name = spelled.removeprefix("<class '").removesuffix("'>").rpartition(".")[2]
    kind = name.removesuffix("Intervention").lower()
    if kind not in KINDS:
        known = ", ".join(f"{kind.capitalize()}Intervention" for kind in KINDS)
        raise CheckpointError(f"{place / CONFIG}: class {name} is unknown; expected one of {known}")
    return kind


def chosen_kind(found: Sequence[Found], fitting: Sequence[str], asked: str | None) -> str:
    """The one kind of all interventions, of the folder's classes or else of those that the tensors fit."""
    named = {item.kind for item in found if item.kind is not None}
    candidates = sorted(named) or list(fitting)
    if len(named) > 1:
        raise CheckpointError(
            f"the folder mixes {', '.join(candidates)}; an adapter has interventions of one method"
        )
    if asked is not None and asked not in candidates:
        raise ConfigError(f"--kind {asked}: the folder holds {' or '.join(candidates)}")
    if not candidates:
        raise CheckpointError(f"{found[0].path} has the tensors of none of pyreft's interventions")
    if asked is None and len(candidates) > 1:
        raise ConfigError(f"--kind: the tensors fit {' and '.join(candidates)}; name what was trained")
    return asked or candidates[0]
