"""DoRA (arXiv 2402.09353): y = (m / ‖W + s·BA‖) ⊙ (W x + s·B A x) + b on chosen linear layers.

A trained magnitude m for each output takes the place of the length that the row of W + s·BA has
itself. That length counts as a constant in the backward pass (section 4.3). Saved in PEFT's format.
On a packed base (QDoRA) m starts as the row norms of the weight before it was packed, and the
length is that of the weight as it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from leantune.config.layers import parse_layers
from leantune.methods.factors import (
    CONFIG_FILE,
    AttachedFactors,
    LowRankFactors,
    add_factors,
    dense_weight,
    is_dora,
    peft_settings,
    update_scale,
)
from leantune.methods.protocol import AdapterFiles, Attached, free_name, named_generator
from leantune.models.anatomy import linear_sizes, match_linears
from leantune.models.shards import local_rows
from leantune.ops.dora import dora_gain, rescale, row_norms, updated_row_norms

__all__ = ["CONFIG_FILE", "AttachedDora", "DoraFactors", "accepts", "attach", "settings_from"]


class DoraFactors(LowRankFactors):
    """The factors of one linear layer, its magnitude (fp32 [out]) and the row norms of its frozen weight.

    Until `set_norms` has been called the norms are not a number, and so is all that comes out.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        scale: float,
        dropout: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__(in_features, out_features, rank, scale, dropout, generator)
        self.magnitude = nn.Parameter(torch.ones(out_features))
        self.stored_norms: Tensor
        self.register_buffer("stored_norms", torch.full((out_features,), torch.nan), persistent=False)

    def forward(self, hidden: Tensor, out: Tensor, layer: nn.Module) -> Tensor:
        """The output of `layer` [..., out] plus the update of `hidden` [..., in], rescaled but for the bias.

        Dropout acts on the input of the update alone; PEFT also drops the input of the base
        product that it computes anew for the rescaling.
        """

        def rescaled(hidden: Tensor, out: Tensor) -> Tensor:
            # The norms are float32 even where the trained parameters are not.
            weight = dense_weight(layer, torch.promote_types(self.A.dtype, torch.float32))
            bias = cast("Tensor | None", layer.bias)
            return rescale(self.updated(hidden, out), self._gain(weight), bias)

        return self.on_acting(hidden, out, rescaled)

    def fold(self, weight: Tensor) -> Tensor:
        return self._gain(weight).unsqueeze(1) * super().fold(weight)

    @torch.no_grad()
    def set_norms(self, unquantised: Tensor, stored: Tensor) -> None:
        """Start the magnitude from the row norms [out] before packing; divide by those of what is stored."""
        rows = local_rows(self.magnitude)
        rows.local.copy_(unquantised[rows.start : rows.stop])
        self.stored_norms.copy_(stored)

    def _gain(self, weight: Tensor) -> Tensor:
        """What each output is multiplied by, [out]; gradients reach the magnitude only."""
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            a, b = self.A.to(weight.dtype), self.B.to(weight.dtype)
            norms = updated_row_norms(self.stored_norms.to(weight.dtype), weight @ a.t(), a, b, self.scale)
        return dora_gain(self.magnitude, norms)


class AttachedDora(AttachedFactors):
    """DoRA on the linear layers `targets` (full name: module)."""

    def __init__(
        self, model: nn.Module, targets: Mapping[str, nn.Module], settings: dict[str, Any], slot: str
    ) -> None:
        def rescale_output(layer: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            factors: Any = getattr(layer, slot)
            return factors(args[0], out, layer)

        super().__init__("dora", "DoRA", model, targets, settings, rescale_output, slot)

    def export(self) -> AdapterFiles:
        files = super().export()
        magnitudes = {
            f"base_model.model.{name}.lora_magnitude_vector": self._factors_of(name).magnitude.detach()
            for name in self.targets
        }
        config = {**files.config, "use_dora": True}
        return AdapterFiles(files.config_file, config, files.tensors_file, {**files.tensors, **magnitudes})

    def row_norm_targets(self) -> Mapping[str, nn.Module]:
        return self.targets

    def set_row_norms(self, name: str, unquantised: Tensor, stored: Tensor) -> None:
        self._factors_of(name).set_norms(unquantised, stored)

    def _factors_of(self, name: str) -> DoraFactors:
        return cast("DoraFactors", self.factors()[name])


def attach(
    model: nn.Module,
    *,
    seed: int,
    rank: int = 16,
    alpha: float = 32.0,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    layers: str | Sequence[int] = "all",
    rslora: bool = False,
    train_embeddings: bool = False,
) -> Attached:
    """Attach DoRA to the linear layers that `target_modules` and `layers` name.

    The update is scaled by alpha / rank, or alpha / sqrt(rank) with `rslora` (arXiv 2312.03732).
    `train_embeddings`: the embeddings and the output head are trained too.
    Layers whose weights are there already give their row norms at once; for the others
    `set_row_norms` must be called. Raises `ModelError` for targets or layers that do not exist.
    """
    targets = match_linears(model, target_modules, parse_layers(layers))
    slot = free_name(targets.values(), "dora")
    scale = update_scale(rank, alpha, rslora)
    for name, layer in targets.items():
        sizes = linear_sizes(layer)
        factors = DoraFactors(*sizes, rank, scale, dropout, named_generator(seed, name))
        if next(layer.parameters()).device.type != "meta":
            norms = row_norms(dense_weight(layer))
            factors.set_norms(norms, norms)
        add_factors(layer, slot, factors)
    settings: dict[str, Any] = {"rank": rank, "alpha": alpha, "dropout": dropout, "rslora": rslora}
    settings["train_embeddings"] = train_embeddings
    return AttachedDora(model, targets, settings, slot)


def accepts(config: Mapping[str, Any]) -> bool:
    """Whether an adapter_config.json is DoRA's; LoRA's adapters have a file of the same name."""
    return is_dora(config)


def settings_from(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `attach` that a PEFT adapter_config.json asks for.

    Raises `CheckpointError` for PEFT features whose neglect would change the logits.
    """
    return peft_settings(config)
