"""Writing an adapter's weights into a copy of its base model, and proving that the copy says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from leantune.bases import load_base
from leantune.checkpoint.adapter import save_model
from leantune.checkpoint.trained import load_trained
from leantune.errors import CheckpointError
from leantune.methods.factors import AttachedFactors
from leantune.methods.head import head_of
from leantune.models.packed import PackedLinear
from leantune.models.source import resolve_model

_SAMPLES, _WIDTH = 4, 32
# Rounding of fp32 sums in another order; a wrong or missing update is orders of magnitude larger.
_TOLERANCE = 1e-4


def merge_run(path: Path, target: Path, base: str | None = None) -> list[str]:
    """Write the merged model of a LoRA, DoRA or full run to `target`; returns lines of what was checked.

    The merged folder is loaded again and its logits are compared with the adapter's on
    random token samples. Raises `CheckpointError` for ReFT, whose edits depend on the
    position of a token and so are no change of weights, or if the logits differ.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists already; choose a new folder for the merged model")
    trained = load_trained(path, base, device="cpu", precision="fp32")
    if head_of(trained.attached) is not None:
        raise CheckpointError(
            f"{path} has a trained head (objective classification or reward), which a language model has no "
            "place for; use the adapter as it is (leantune eval, leantune.load)"
        )
    foldable = isinstance(trained.attached, AttachedFactors)
    if trained.attached.adapter_files() and not foldable:
        raise CheckpointError(
            f"{path} is a {trained.attached.name} adapter: it edits hidden states at chosen prompt tokens, "
            "which no change of weights can do; use the adapter as it is (leantune generate, leantune.load)"
        )
    samples = _samples(trained.model)
    expected = _logits(trained.model, samples)
    embeddings = trained.attached.embeddings
    packed = sum(isinstance(module, PackedLinear) for module in trained.model.modules())
    if isinstance(trained.attached, AttachedFactors):
        fold_into_weights(trained.attached)
    unpack_weights(trained.model)
    lines = [save_model(trained.model, trained.tokenizer, target)]
    if packed:
        base_name = trained.config.base.name if trained.config else "packed"
        lines.append(
            f"the weights of {packed} linear layers come from the {base_name} base that was trained against, "
            "unpacked to fp32, not from the checkpoint"
        )
    if embeddings is not None:
        lines.append(embeddings.describe())
    merged = load_base("dense", resolve_model(str(target)))
    difference = float((_logits(merged.eval(), samples) - expected).abs().max())
    scale = float(expected.abs().max())
    if difference > _TOLERANCE * max(1.0, scale):
        raise CheckpointError(
            f"{target}: the merged model's logits differ from the adapter's by {difference:.2e} "
            f"(largest logit {scale:.1f}); do not use it"
        )
    lines.append(
        f"logits of the merged model equal the adapter's on {_SAMPLES} samples of {_WIDTH} tokens "
        f"(largest difference {difference:.1e})"
    )
    return lines


def fold_into_weights(attached: AttachedFactors) -> None:
    """Put each merged weight in the place of its layer's own and take the factors off the model.

    Packed layers that have factors become dense ones.
    """
    places = _places(attached.model)
    for layer, weight in attached.merged_weights():
        dense: Any = _unpack(places, layer) if isinstance(layer, PackedLinear) else layer
        dense.weight.data.copy_(weight if isinstance(dense, nn.Linear) else weight.t())
    attached.detach()


def unpack_weights(model: nn.Module) -> None:
    """Replace every packed layer by a dense one that computes the same."""
    places = _places(model)
    for layer in places:
        if isinstance(layer, PackedLinear):
            _unpack(places, layer)


def _places(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Where each module hangs: (parent, name), more than one for a module that is shared."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            places.setdefault(child, []).append((parent, name))
    return places


def _unpack(places: dict[nn.Module, list[tuple[nn.Module, str]]], layer: PackedLinear) -> nn.Module:
    dense = layer.to_dense()
    for parent, name in places[layer]:
        setattr(parent, name, dense)
    return dense


def _samples(model: PreTrainedModel) -> Tensor:
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (_SAMPLES, _WIDTH), generator=generator)


@torch.no_grad()
def _logits(model: PreTrainedModel, samples: Tensor) -> Tensor:
    return model(input_ids=samples, use_cache=False).logits.float()
