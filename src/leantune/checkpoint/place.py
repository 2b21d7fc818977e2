"""What was named for use: a run, an adapter folder, a model; and the base model that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from leantune.bases import load_base
from leantune.checkpoint.adapter import (
    adapter_base,
    is_adapter,
    saved_markers,
    saved_storage,
    saved_vocabulary,
)
from leantune.checkpoint.run_folder import CONFIG, RunFolder
from leantune.config import RunConfig, load_config
from leantune.data.templates import Template, make_template
from leantune.errors import CheckpointError, ConfigError
from leantune.models.precision import Precision, choose_precision
from leantune.models.source import ModelSource, load_tokenizer, resolve_model
from leantune.models.vocabulary import Growth, load_vocabulary


@dataclass(frozen=True)
class BaseNeeds:
    """Which base model something was trained on, and the form that it has to be loaded in."""

    source: ModelSource
    storage: dict[str, Any]
    precision: Precision
    attention: str
    tokenizer: PreTrainedTokenizerBase
    growth: Growth | None
    device: torch.device

    def load(self) -> PreTrainedModel:
        """The base model."""
        return load_base(
            str(self.storage["name"]),
            self.source,
            precision=self.precision,
            device=self.device,
            attention=self.attention,
            settings={key: value for key, value in self.storage.items() if key != "name"},
            growth=self.growth,
        )


@dataclass(frozen=True)
class Place:
    """What was named: a run (or a part of it), an adapter folder, or a model."""

    name: str
    path: Path
    run: RunFolder | None
    config: RunConfig | None

    @classmethod
    def of(cls, path: str | Path) -> Place:
        place = Path(path).expanduser()
        run = run_of(place)
        return cls(str(path), place, run, load_config(run.config) if run else None)

    @property
    def whole_model(self) -> Path | None:
        """The model folder of a run that trained all weights."""
        return self.run.model if self.run and self.run.model.is_dir() else None

    @property
    def adapter(self) -> Path | None:
        """The adapter folder; raises `CheckpointError` for a run that did not finish."""
        if self.run is None:
            return self.path if self.path.is_dir() and is_adapter(self.path) else None
        if self.whole_model is None and not self.run.adapter.is_dir():
            raise CheckpointError(
                f"{self.path} has neither adapter/ nor model/: the run did not finish; "
                f"`leantune resume {self.path}`"
            )
        return self.run.adapter if self.whole_model is None else None

    def base(self, named: str | None) -> ModelSource:
        """The model that was trained, or the one that is named to stand in for it."""
        trusted = self.config is not None and self.config.model.trust_remote_code
        if named is not None:
            return resolve_model(named, trust_remote_code=trusted)
        if self.config is not None:
            return resolve_model(self.config.model.name, self.config.model.revision, trusted)
        return resolve_model(*adapter_base(self.path))


def markers_of(place: Place) -> tuple[str, str] | None:
    """The markers that prompts of the run or adapter have around the spans that are edited."""
    if place.config is not None:
        return place.config.data.markers
    return saved_markers(place.path)


def run_of(place: Path) -> RunFolder | None:
    """The run that this folder is, or whose adapter/ or model/ it is."""
    if (place / CONFIG).is_file():
        return RunFolder.open(place)
    above, part = place.resolve().parent, place.resolve().name
    # Somebody may keep a run.yaml of his own beside a folder called model.
    is_part = part in ("adapter", "model") and all((above / n).is_file() for n in (CONFIG, "data.json"))
    return RunFolder.open(above) if is_part else None


def adapter_and_base(
    place: Place, base: str | None = None, untouched: bool = False
) -> tuple[Path | None, ModelSource]:
    """The adapter folder, if there is one, and the model under it."""
    adapter = place.adapter
    if untouched:
        return None, place.base(base)
    if adapter is not None:
        return adapter, place.base(base)
    if base is not None:
        raise ConfigError(f"base: {place.name} is a whole model, not an adapter of {base}; leave it out")
    trusted = place.config is not None and place.config.model.trust_remote_code
    return None, resolve_model(str(place.whole_model or place.name), trust_remote_code=trusted)


def base_needs(
    place: Place,
    adapter: Path | None,
    source: ModelSource,
    device: str = "auto",
    precision: str | None = None,
    untouched: bool = False,
) -> BaseNeeds:
    """The base model as the run or adapter was trained on it."""
    config, target = place.config, _device(device)
    chosen = choose_precision(precision or (config.train.precision if config else "auto"), target)
    storage = (
        config.base.model_dump() if config else (adapter and saved_storage(adapter)) or {"name": "dense"}
    )
    tokenizer, growth = _vocabulary(place, source, untouched)
    attention = _attention(config, target, chosen.weights)
    return BaseNeeds(source, storage, chosen, attention, tokenizer, growth, target)


def _vocabulary(
    place: Place, source: ModelSource, untouched: bool
) -> tuple[PreTrainedTokenizerBase, Growth | None]:
    """The tokenizer that was trained with, and the rows that its added tokens need in the base model."""
    folder, config = place.adapter, place.config
    if folder is not None and (saved := saved_vocabulary(folder, source)) is not None:
        return saved
    if config is None:
        return load_tokenizer(source), None
    if config.model.add_tokens and not untouched:  # a whole model, which has its rows and its tokenizer
        return load_tokenizer(source), None
    return load_vocabulary(source, config.model.tokenizer, config.model.add_tokens)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _attention(config: RunConfig | None, device: torch.device, dtype: torch.dtype) -> str:
    """The run's attention kernel."""
    asked = config.model.attention if config else "auto"
    # A run may be used on a machine, or merged in a precision, that this kernel does not exist for.
    usable = asked != "flash_attention_2" or (device.type == "cuda" and dtype == torch.bfloat16)
    return asked if usable else "auto"


def template_of(
    place: Place,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None = None,
    system: str | None = None,
) -> tuple[str, Template]:
    """What prompts are rendered with: as it was named, and itself."""
    spec, format, own_system = _rendering(place, template)
    told = (own_system if system is None else system) or None
    return spec, make_template(spec, format, tokenizer, system=told)


def _rendering(place: Place, template: str | None) -> tuple[str, str, str | None]:
    """(template, format, system message) that prompts are rendered with."""
    if place.run is None or place.config is None:
        return template or "auto", "prompt_completion", None
    facts = place.run.read_json("data.json")
    if facts["format"] in ("text", "dummy"):  # nothing to render: prompts are continued as they are
        return template or "plain", "prompt_completion", None
    own = place.run.template  # the user's file as it was when the run was prepared
    trained_with = str(own) if own.is_file() else str(facts["template"])
    return template or trained_with, str(facts["format"]), place.config.data.system
