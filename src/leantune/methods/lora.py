"""LoRA (arXiv 2106.09685): y = W x + scale · B A x on chosen linear layers; saved in PEFT's format.

The factors hang on the linear layer as a small submodule and act through a forward hook, so
the layer itself, its names and its kind (dense or packed) stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leantune.config.layers import parse_layers
from leantune.errors import CheckpointError, ModelError
from leantune.methods.protocol import AdapterFiles, Attached, named_generator
from leantune.models.anatomy import linear_sizes, linears, match_linears, summarise_names
from leantune.ops.lowrank import add_lowrank, lowrank_weight

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"


class LoraFactors(nn.Module):
    """The factors of one linear layer. A: fp32 [rank, in], B: fp32 [out, rank], zero at the start."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        scale: float,
        dropout: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(in_features)  # PEFT's: Kaiming uniform with a = sqrt(5)
        self.A = nn.Parameter(torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator))
        self.B = nn.Parameter(torch.zeros(out_features, rank))
        self.scale = scale
        self.dropout = dropout
        self.enabled = True

    def forward(self, hidden: Tensor, out: Tensor) -> Tensor:
        """`out` [..., out] plus the update of `hidden` [..., in]."""
        if not self.enabled:
            return out
        if self.training and self.dropout > 0:
            hidden = F.dropout(hidden, self.dropout)
        if torch.is_autocast_enabled(hidden.device.type):
            return add_lowrank(out, hidden, self.A, self.B, self.scale)
        dtype = self.A.dtype
        return add_lowrank(out.to(dtype), hidden.to(dtype), self.A, self.B, self.scale).to(out.dtype)

    def weight(self) -> Tensor:
        """The dense update, [out, in], fp32."""
        return lowrank_weight(self.A, self.B, self.scale)


class AttachedLora(Attached):
    """LoRA on the linear layers `targets` (full name: module)."""

    def __init__(self, model: nn.Module, targets: Mapping[str, nn.Module], settings: dict[str, Any]) -> None:
        super().__init__("lora", model)
        self.targets = dict(targets)
        self.settings = settings
        self.target_modules = _shortest_targets(model, targets)
        self._hooks = [
            m.register_forward_hook(_update_output) for m in targets.values() if hasattr(m, "lora")
        ]

    def detach(self) -> None:
        """Take the factors off the model."""
        for hook in self._hooks:
            hook.remove()
        for module in self.targets.values():
            del module.lora

    def factors(self) -> dict[str, LoraFactors]:
        """The factors by the full name of their linear layer."""
        return {name: module.lora for name, module in self.targets.items()}  # pyright: ignore[reportReturnType]

    @contextmanager
    def disabled(self) -> Generator[None]:
        for factors in self.factors().values():
            factors.enabled = False
        try:
            yield
        finally:
            for factors in self.factors().values():
                factors.enabled = True

    def describe(self) -> list[str]:
        return [f"LoRA on {len(self.targets)} linear layers: {summarise_names(self.targets)}"]

    def export(self) -> AdapterFiles:
        tensors: dict[str, Tensor] = {}
        for name, factors in self.factors().items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = factors.A.detach()
            tensors[f"base_model.model.{name}.lora_B.weight"] = factors.B.detach()
        return AdapterFiles(CONFIG_FILE, self._peft_config(), TENSORS_FILE, tensors)

    def merged_weights(self) -> Iterator[tuple[nn.Module, Tensor]]:
        """Each linear layer with the update that belongs on its weight, [out, in]."""
        for name, factors in self.factors().items():
            yield self.targets[name], factors.weight().detach()

    def _peft_config(self) -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.settings["rank"],
            "lora_alpha": self.settings["alpha"],
            "lora_dropout": self.settings["dropout"],
            "use_rslora": self.settings["rslora"],
            "target_modules": self.target_modules,
            "bias": "none",
            "fan_in_fan_out": _are_transposed(self.targets),
            "inference_mode": True,
        }


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
    implementation: str = "leantune",
) -> Attached:
    """Attach LoRA to the linear layers that `target_modules` and `layers` name.

    The update is scaled by alpha / rank, or alpha / sqrt(rank) with `rslora`
    (arXiv 2312.03732). Raises `ModelError` for targets or layers that do not exist.
    """
    targets = match_linears(model, target_modules, parse_layers(layers))
    settings = {"rank": rank, "alpha": alpha, "dropout": dropout, "rslora": rslora}
    if implementation == "peft":
        return _attach_peft(model, targets, settings, seed)
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    for name, module in targets.items():
        factors = LoraFactors(*linear_sizes(module), rank, scale, dropout, named_generator(seed, name))
        module.add_module("lora", factors.to(next(module.parameters()).device))
    return AttachedLora(model, targets, settings)


def _update_output(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
    factors: Any = module.lora
    return factors(args[0], out)


# Keys of PEFT that make another module of the same tensors.
_PEFT_VARIANTS = (
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)


def settings_from(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `attach` that a PEFT adapter_config.json asks for.

    Raises `CheckpointError` for PEFT features whose neglect would change the logits.
    """
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"adapter_config.json: peft_type {config.get('peft_type')!r} is not LORA")
    neutral: dict[str, tuple[Any, ...]] = {
        "use_dora": (False, None),
        "bias": ("none", None),
        "modules_to_save": (None, []),
        "rank_pattern": ({}, None),
        "alpha_pattern": ({}, None),
        "lora_bias": (False, None),
        "exclude_modules": (None, []),
        "trainable_token_indices": (None, []),
        "target_parameters": (None, []),
        "layer_replication": (None, []),
        "layers_pattern": (None, []),
        # Starts that would change the frozen weights, such as PiSSA's, are not among these.
        "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
        **dict.fromkeys(_PEFT_VARIANTS, (None, False, [])),
    }
    for key, allowed in neutral.items():
        if config.get(key) not in allowed:
            raise CheckpointError(
                f"adapter_config.json: {key} = {config[key]!r} is not supported here; load it with PEFT"
            )
    absent = [key for key in ("r", "lora_alpha", "target_modules") if config.get(key) is None]
    if absent:
        raise CheckpointError(f"adapter_config.json: {absent[0]} is missing; it is no complete LoRA adapter")
    layers = config.get("layers_to_transform")
    return {
        "rank": int(config["r"]),
        "alpha": float(config["lora_alpha"]),
        "dropout": float(config.get("lora_dropout", 0.0)),
        "rslora": bool(config.get("use_rslora", False)),
        "target_modules": config["target_modules"],
        "layers": "all" if layers is None else [layers] if isinstance(layers, int) else layers,
    }


def _are_transposed(targets: Mapping[str, nn.Module]) -> bool:
    """Whether the weights are [in, out], as GPT-2 has them."""
    return any(not isinstance(module, nn.Linear) for module in targets.values())


def _shortest_targets(model: nn.Module, targets: Mapping[str, nn.Module]) -> list[str]:
    """Last names if they mean exactly these modules, to PEFT as to us; full names otherwise."""
    suffixes = {name.rpartition(".")[2] for name in targets}
    meant = {name for name in linears(model) if name.rpartition(".")[2] in suffixes}
    return sorted(suffixes) if meant == set(targets) else sorted(targets)


class _AttachedPeft(AttachedLora):
    """The same layers adapted by PEFT's module, for comparison; saved the same way."""

    def factors(self) -> dict[str, LoraFactors]:
        raise ModelError("method.implementation peft has no factors of leantune's; use leantune's to merge")

    @contextmanager
    def disabled(self) -> Generator[None]:
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
        tensors = {
            f"base_model.model.{name.replace('.default.', '.')}": parameter.detach()
            for name, parameter in self.trainable().items()
        }
        return AdapterFiles(CONFIG_FILE, self._peft_config(), TENSORS_FILE, tensors)


def _attach_peft(
    model: nn.Module, targets: Mapping[str, nn.Module], settings: dict[str, Any], seed: int
) -> Attached:
    try:
        from peft import LoraConfig, inject_adapter_in_model
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
        fan_in_fan_out=_are_transposed(targets),
    )
    attached = _AttachedPeft(model, targets, settings)
    inject_adapter_in_model(config, model)
    for name, parameter in attached.trainable().items():
        parameter.data = parameter.data.float()  # PEFT gave it the dtype of the frozen weight
        if ".lora_A." in name:  # the same start as leantune's module
            bound = 1.0 / math.sqrt(parameter.shape[1])
            generator = named_generator(seed, name.partition(".lora_A.")[0])
            start = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            parameter.data.copy_(start)
    return attached
