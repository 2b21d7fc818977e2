"""LoRA (arXiv 2106.09685): y = W x + scale · B A x on chosen linear layers; saved in PEFT's format."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from leantune.config.layers import parse_layers
from leantune.errors import ModelError
from leantune.methods.factors import (
    CONFIG_FILE,
    TENSORS_FILE,
    AttachedFactors,
    LowRankFactors,
    add_factors,
    are_transposed,
    is_dora,
    peft_settings,
    update_scale,
)
from leantune.methods.protocol import AdapterFiles, Attached, free_name, named_generator
from leantune.models.anatomy import linear_sizes, match_linears
from leantune.models.packed import PackedLinear

__all__ = ["CONFIG_FILE", "AttachedLora", "LoraFactors", "accepts", "attach", "settings_from"]


class LoraFactors(LowRankFactors):
    """The factors of one linear layer."""

    def forward(self, hidden: Tensor, out: Tensor) -> Tensor:
        """`out` [..., out] plus the update of `hidden` [..., in]."""
        return self.on_acting(hidden, out, self.updated)


class AttachedLora(AttachedFactors):
    """LoRA on the linear layers `targets` (full name: module)."""

    def __init__(
        self, model: nn.Module, targets: Mapping[str, nn.Module], settings: dict[str, Any], slot: str
    ) -> None:
        def update_output(layer: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            factors: Any = getattr(layer, slot)
            return factors(args[0], out)

        super().__init__("lora", "LoRA", model, targets, settings, update_output, slot)


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
    implementation: str = "leantune",
) -> Attached:
    """Attach LoRA to the linear layers that `target_modules` and `layers` name.

    The update is scaled by alpha / rank, or alpha / sqrt(rank) with `rslora`
    (arXiv 2312.03732). `train_embeddings`: the embeddings and the output head are trained too.
    Raises `ModelError` for targets or layers that do not exist.
    """
    targets = match_linears(model, target_modules, parse_layers(layers))
    settings: dict[str, Any] = {"rank": rank, "alpha": alpha, "dropout": dropout, "rslora": rslora}
    settings["train_embeddings"] = train_embeddings
    if implementation == "peft":
        return _attach_peft(model, targets, settings, seed)
    scale, slot = update_scale(rank, alpha, rslora), free_name(targets.values(), "lora")
    for name, layer in targets.items():
        sizes = linear_sizes(layer)
        add_factors(layer, slot, LoraFactors(*sizes, rank, scale, dropout, named_generator(seed, name)))
    return AttachedLora(model, targets, settings, slot)


def accepts(config: Mapping[str, Any]) -> bool:
    """Whether an adapter_config.json is LoRA's; DoRA's adapters have a file of the same name."""
    return not is_dora(config)


def settings_from(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `attach` that a PEFT adapter_config.json asks for.

    Raises `CheckpointError` for PEFT features whose neglect would change the logits.
    """
    return peft_settings(config)


class _AttachedPeft(AttachedFactors):
    """The same layers adapted by PEFT's module, for comparison; saved the same way."""

    def __init__(self, model: nn.Module, targets: Mapping[str, nn.Module], settings: dict[str, Any]) -> None:
        super().__init__("lora", "LoRA", model, targets, settings, hook=None)

    def factors(self) -> dict[str, LowRankFactors]:
        raise ModelError("method.implementation peft has no factors of leantune's; use leantune's to merge")

    @contextmanager
    def disabled(self) -> Generator[None]:
        self.refuse_if_changed()
        from peft.tuners.lora import LoraLayer

        layers = [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def export(self) -> AdapterFiles:
        embeddings = self.embeddings.tensors("base_model.model.") if self.embeddings else {}
        tensors = {
            f"base_model.model.{name.replace('.default.', '.')}": parameter.detach()
            for name, parameter in self.trainable().items()
            if f"base_model.model.{name}" not in embeddings
        }
        tensors |= embeddings
        return AdapterFiles(CONFIG_FILE, self._peft_config(), TENSORS_FILE, tensors)


def _attach_peft(
    model: nn.Module, targets: Mapping[str, nn.Module], settings: dict[str, Any], seed: int
) -> Attached:
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear
    except ImportError as error:
        raise ModelError(
            'method.implementation: peft is not installed; `uv pip install "leantune[peft]"` brings it'
        ) from error
    config = LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        lora_dropout=settings["dropout"],
        use_rslora=settings["rslora"],
        target_modules=sorted(targets),
        fan_in_fan_out=are_transposed(targets),
    )
    # The way that PEFT's documentation gives for layers it does not know.
    config._register_custom_module({PackedLinear: Linear})  # pyright: ignore[reportPrivateUsage]
    attached = _AttachedPeft(model, targets, settings)
    inject_adapter_in_model(config, model)
    for name, parameter in attached.trainable().items():
        # The same start as leantune's module, in fp32 memory: PEFT took dtype and device of the weight.
        start = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            bound = 1.0 / math.sqrt(parameter.shape[1])
            start.uniform_(-bound, bound, generator=named_generator(seed, name.partition(".lora_A.")[0]))
        owner, _, attribute = name.rpartition(".")
        device = "cpu" if parameter.device.type == "meta" else parameter.device
        setattr(model.get_submodule(owner), attribute, nn.Parameter(start.to(device)))
    if attached.embeddings is not None:  # PEFT has frozen them
        attached.embeddings.require_gradients()
    return attached
