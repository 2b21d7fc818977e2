"""The models that are served: adapters side by side on one base model, or one model alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from leantune.checkpoint.adapter import load_adapters
from leantune.checkpoint.place import BaseNeeds, Place, adapter_and_base, base_needs, template_of
from leantune.checkpoint.trained import load_trained
from leantune.data.examples import Message
from leantune.data.templates import Template, make_template
from leantune.errors import ConfigError
from leantune.generate.prompts import stop_ids
from leantune.methods import Attached
from leantune.methods.choice import AdapterSet
from leantune.methods.head import head_of

BASE = "base"


@dataclass(frozen=True)
class ServedModel:
    """What a model name stands for. adapter: its name among several; attached: what it is by itself."""

    name: str
    template: Template
    attached: Attached
    adapter: str | None = None

    def prompt(self, messages: Sequence[Message]) -> str:
        """The conversation as it was trained on; with the system message of the run if it has none."""
        return self.template.conversation_prompt(self.template.with_system(tuple(messages)))


@dataclass(frozen=True)
class Served:
    """One model in memory under one name or several; `attached` acts on a batch of them."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    attached: Attached
    models: Mapping[str, ServedModel]

    def stop_token_ids(self, model: ServedModel) -> frozenset[int]:
        """The tokens that end an answer of this model."""
        return frozenset(stop_ids(self.model, self.tokenizer)) | frozenset(model.template.stop_token_ids)


def named_runs(texts: Iterable[str]) -> dict[str, str]:
    """The run of each model name, from `RUN` or `NAME=RUN`; raises `ConfigError` for a name used twice."""
    runs: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or Path(text).expanduser().exists():
            name, path = _own_name(text), text
        if not name or not path:
            raise ConfigError(f"{text!r}: expected RUN or NAME=RUN")
        if name in runs:
            raise ConfigError(
                f"{text}: the name {name!r} is that of {runs[name]}; choose one with NAME={path}"
            )
        if name == BASE:
            raise ConfigError(
                f"{text}: the name {BASE!r} is that of the base model; choose one with NAME={path}"
            )
        runs[name] = path
    return runs


def load_served(runs: Mapping[str, str], base: str | None = None, device: str = "auto") -> Served:
    """Load the runs, adapter folders or models of these names.

    Several must be adapters that were trained on one base model in one form. `base` names it if it has
    moved. Raises `ConfigError` naming what differs, and what `load_trained` raises.
    """
    if len(runs) == 1:
        return _only(*next(iter(runs.items())), base, device)
    places = {name: Place.of(path) for name, path in runs.items()}
    folders: dict[str, Path] = {}
    needs: dict[str, BaseNeeds] = {}
    for name, place in places.items():
        adapter, source = adapter_and_base(place, base)
        if adapter is None:
            raise ConfigError(
                f"{place.name} is a whole model, which shares nothing with others; serve it alone"
            )
        folders[name] = adapter
        needs[name] = base_needs(place, adapter, source, device)
    (first, shared), *others = needs.items()
    for name, own in others:
        _refuse_different(places[first].name, shared, places[name].name, own)
    model = shared.load()
    adapters = load_adapters(model, folders)
    templates = {name: template_of(place, shared.tokenizer)[1] for name, place in places.items()}
    return _side_by_side(model, shared.tokenizer, adapters, templates)


def _only(name: str, path: str, base: str | None, device: str) -> Served:
    """One adapter beside its base model; or one model alone, if there is no base model left to choose."""
    trained = load_trained(path, base, device)
    model, tokenizer, attached = trained.model, trained.tokenizer, trained.attached
    if attached.adapter_files() and attached.embeddings is None:
        adapters = AdapterSet(model, {name: attached})
        return _side_by_side(model, tokenizer, adapters, {name: trained.template})
    return Served(model, tokenizer, attached, {name: ServedModel(name, trained.template, attached)})


def _side_by_side(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    adapters: AdapterSet,
    templates: Mapping[str, Template],
) -> Served:
    """The adapters, and the base model as it is used without any of them."""
    for name, adapter in adapters.adapters.items():
        if head_of(adapter) is not None:
            raise ConfigError(
                f"{name} has a trained head, which answers no conversation; use `leantune eval` for it"
            )
    models = {
        name: ServedModel(name, template, adapters.adapters[name], name)
        for name, template in templates.items()
    }
    own = make_template("auto", "prompt_completion", tokenizer)
    models[BASE] = ServedModel(BASE, own, Attached(BASE, model))
    return Served(model, tokenizer, adapters, models)


def _own_name(path: str) -> str:
    """The name of the run's or model's folder, the last word of a hub id."""
    run = Place.of(path).run
    return (run.path if run else Path(path).expanduser()).resolve().name


def _refuse_different(first: str, shared: BaseNeeds, name: str, own: BaseNeeds) -> None:
    """Raise `ConfigError` naming the first thing in which two base models differ."""
    ours, theirs = _facts(shared), _facts(own)
    for what, (compared, shown) in ours.items():
        if compared != theirs[what][0]:
            raise ConfigError(
                f"{name} cannot be served beside {first}: the {what} is {theirs[what][1]}, not {shown}; "
                "serve it on its own"
            )


def _facts(needs: BaseNeeds) -> dict[str, tuple[Any, str]]:
    """What adapters on one base model must agree in: to compare, and to show."""
    source, location = needs.source, Path(needs.source.location).expanduser()
    where = str(location.resolve()) if location.is_dir() else source.location
    revision = f" at {source.revision}" if source.revision else ""
    vocabulary = needs.tokenizer.get_vocab()
    storage = ", ".join(
        str(value) if key == "name" else f"{key} {value}" for key, value in needs.storage.items()
    )
    return {
        "base model": ((where, source.revision), f"{source.name}{revision}"),
        "base storage": (
            needs.storage,
            f"{needs.storage['name']} ({storage})" if storage else needs.storage["name"],
        ),
        "tokenizer": ((vocabulary, needs.growth), f"one of {len(vocabulary)} tokens"),
        "precision": (needs.precision, str(needs.precision)),
        "attention": (needs.attention, needs.attention),
    }
