"""Writing an adapter's weights into a copy of its base model, and proving that the copy says the same."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from leantune.bases import load_base
from leantune.checkpoint.adapter import save_model
from leantune.checkpoint.trained import load_trained
from leantune.errors import CheckpointError
from leantune.methods.lora import AttachedLora
from leantune.models.source import resolve_model

_SAMPLES, _WIDTH = 4, 32
# Rounding of fp32 sums in another order; a wrong or missing update is orders of magnitude larger.
_TOLERANCE = 1e-4


def merge_run(path: Path, target: Path, base: str | None = None) -> list[str]:
    """Write the merged model of a LoRA or full run to `target`; returns lines of what was checked.

    The merged folder is loaded again and its logits are compared with the adapter's on
    random token samples. Raises `CheckpointError` for ReFT, whose edits depend on the
    position of a token and so are no change of weights, or if the logits differ.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists already; choose a new folder for the merged model")
    trained = load_trained(path, base, device="cpu", precision="fp32")
    if trained.attached.name not in ("lora", "full", "base"):
        raise CheckpointError(
            f"{path} is a {trained.attached.name} adapter: it edits hidden states at chosen prompt tokens, "
            "which no change of weights can do; use the adapter as it is (leantune generate, leantune.load)"
        )
    samples = _samples(trained.model)
    expected = _logits(trained.model, samples)
    if isinstance(trained.attached, AttachedLora):
        fold_into_weights(trained.attached)
    lines = [save_model(trained.model, trained.tokenizer, target)]
    merged = load_base("dense", resolve_model(str(target)), dtype=torch.float32, device=torch.device("cpu"))
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


@torch.no_grad()
def fold_into_weights(attached: AttachedLora) -> None:
    """Add each update to its weight and take the factors off the model."""
    for module, update in attached.merged_weights():
        weight: nn.Parameter = module.weight  # pyright: ignore[reportAssignmentType]
        weight.add_(update if isinstance(module, nn.Linear) else update.t())
    attached.detach()


def _samples(model: PreTrainedModel) -> Tensor:
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (_SAMPLES, _WIDTH), generator=generator)


@torch.no_grad()
def _logits(model: PreTrainedModel, samples: Tensor) -> Tensor:
    return model(input_ids=samples, use_cache=False).logits.float()
