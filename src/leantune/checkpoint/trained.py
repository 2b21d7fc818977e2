"""Loading something trained for use: a run, an adapter folder, a model folder or hub id, `demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from leantune.checkpoint.adapter import is_adapter, load_adapter
from leantune.checkpoint.place import Place, adapter_and_base, base_needs, markers_of, run_of, template_of
from leantune.checkpoint.run_folder import RunFolder
from leantune.config import RunConfig
from leantune.data.templates import Template
from leantune.methods import Attached
from leantune.models.precision import Precision


@dataclass
class Trained:
    """A model ready for use. `attached` is its adapter, or a no-op for a model without one.

    `run` and `config` are those of the run it comes from, None if it comes from none.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    attached: Attached
    precision: Precision
    template: Template
    template_name: str
    run: RunFolder | None
    config: RunConfig | None


def is_trained(path: str | Path) -> bool:
    """Whether this is a run or an adapter folder, which say what model they were trained on."""
    place = Path(path).expanduser()
    return run_of(place) is not None or (place.is_dir() and is_adapter(place))


def load_trained(
    path: str | Path,
    base: str | None = None,
    device: str = "auto",
    template: str | None = None,
    system: str | None = None,
    *,
    precision: str | None = None,
    untouched: bool = False,
) -> Trained:
    """Load a run folder, an adapter folder, a model folder, a hub id, or `demo`.

    `base` names the base model of an adapter folder that does not say, or stands in for one
    that has moved; it is packed as the one that the adapter was trained on. A run (also named by its
    adapter/ or model/) is used as it was trained: with its template, system message, tokenizer, precision
    and attention, unless others are named. `untouched` gives the model under a run or adapter, used in the
    same way: tokens that training added have the embeddings that they started with. Weights are fp32 on a
    CPU and bf16 on a GPU that has it, if neither `precision` (as `train.precision`) nor a run
    says otherwise. Raises `CheckpointError`, `ConfigError` or `ModelError`.
    """
    place = Place.of(path)
    adapter, source = adapter_and_base(place, base, untouched)
    needs = base_needs(place, adapter, source, device, precision, untouched)
    model, config = needs.load(), place.config
    whole = config.method.name if config is not None and not untouched else "base"
    attached = load_adapter(model, adapter) if adapter else Attached(whole, model)
    if untouched:  # it is to see the prompts that were trained on
        attached.markers = markers_of(place)
    spec, rendered = template_of(place, needs.tokenizer, template, system)
    return Trained(
        place.name, model, needs.tokenizer, attached, needs.precision, rendered, spec, place.run, config
    )
