"""Loading something trained for use: a run, an adapter folder, a model folder or hub id, `demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from leantune.bases import load_base
from leantune.checkpoint.adapter import adapter_base, is_adapter, load_adapter
from leantune.checkpoint.run_folder import CONFIG, RunFolder
from leantune.config import RunConfig, load_config
from leantune.data.templates import Template, make_template
from leantune.errors import CheckpointError
from leantune.methods import Attached
from leantune.models.source import ModelSource, load_tokenizer, resolve_model


@dataclass
class Trained:
    """A model ready for use. `attached` is its adapter, or a no-op for a model without one."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    attached: Attached
    template: Template
    template_name: str
    config: RunConfig | None


def load_trained(
    path: str | Path,
    base: str | None = None,
    device: str = "auto",
    template: str | None = None,
    system: str | None = None,
) -> Trained:
    """Load a run folder, an adapter folder, a model folder, a hub id, or `demo`.

    `base` names the base model of an adapter folder that does not say, or stands in for one
    that has moved. A run's prompts are rendered with the run's own template unless `template`
    names another; so is its system message. Weights are fp32 on a CPU, and bf16 on a GPU that has it.
    Raises `CheckpointError` or `ModelError`.
    """
    place = Path(path).expanduser()
    config = load_config(place / CONFIG) if (place / CONFIG).is_file() else None
    adapter, source = _what(place, str(path), config, base)
    target = _device(device)
    bf16 = target.type == "cuda" and torch.cuda.is_bf16_supported()
    dtype = torch.bfloat16 if bf16 else torch.float32
    model = load_base("dense", source, dtype=dtype, device=target).eval()
    attached = load_adapter(model, adapter) if adapter else Attached("base", model)
    named = config.model.tokenizer if config else None
    tokenizer = load_tokenizer(source, named)
    spec, format, own_system = _template_of(config, place, template)
    rendered = make_template(spec, format, tokenizer, system=system or own_system)
    return Trained(str(path), model, tokenizer, attached, rendered, spec, config)


def _what(
    place: Path, name: str, config: RunConfig | None, base: str | None
) -> tuple[Path | None, ModelSource]:
    """The adapter folder, if there is one, and the model under it."""
    if config is not None:
        run = RunFolder.open(place)
        if run.model.is_dir():
            return None, resolve_model(str(run.model))
        if not run.adapter.is_dir():
            raise CheckpointError(
                f"{place} has neither adapter/ nor model/: the run did not finish; `leantune resume {place}`"
            )
        section = config.model
        return run.adapter, resolve_model(base or section.name, section.revision, section.trust_remote_code)
    if place.is_dir() and is_adapter(place):
        told, revision = (base, None) if base else adapter_base(place)
        return place, resolve_model(told, revision)
    return None, resolve_model(name)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _template_of(config: RunConfig | None, place: Path, template: str | None) -> tuple[str, str, str | None]:
    """(template, format, system message) that prompts are rendered with."""
    if template is not None:
        return template, "prompt_completion", None
    if config is None:
        return "auto", "prompt_completion", None
    facts = RunFolder.open(place).read_json("data.json")
    if facts["format"] in ("text", "dummy"):  # nothing to render: prompts are continued as they are
        return "plain", "prompt_completion", None
    return facts["template"], facts["format"], config.data.system
