"""What LoRA and DoRA share: low-rank factors that hang on linear layers, and PEFT's files for them.

The factors are a small submodule of the linear layer, named as the method, and act through a
forward hook, so the layer itself, its names and its kind (dense or packed) stay as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from leantune.errors import CheckpointError, ModelError
from leantune.methods.embeddings import TrainedEmbeddings
from leantune.methods.prompts import EditOptions
from leantune.methods.protocol import AdapterFiles, Attached, home
from leantune.models.anatomy import linears, summarise_names
from leantune.models.packed import PackedLinear
from leantune.ops.lowrank import add_lowrank, lowrank_weight

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"

# PEFT saves resized embeddings three times: as trained, so again in their wrapper, and as they were.
_PEFT_COPY = re.compile(r"\.(modules_to_save|original_module)\.(weight|bias)$")

Hook = Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]


class LowRankFactors(nn.Module):
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
        self.acting: Tensor | None = None  # bool [P]: the prompts of the batch that are updated; all if None

    def updated(self, hidden: Tensor, out: Tensor) -> Tensor:
        """`out` [..., out] plus the update of `hidden` [..., in], which dropout acts on in training."""
        dropout = self.dropout if self.training else 0.0
        if torch.is_autocast_enabled(hidden.device.type):
            return add_lowrank(out, hidden, self.A, self.B, self.scale, dropout)
        dtype = self.A.dtype
        return add_lowrank(out.to(dtype), hidden.to(dtype), self.A, self.B, self.scale, dropout).to(out.dtype)

    def on_acting(self, hidden: Tensor, out: Tensor, update: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`update(hidden, out)` for the rows of the batch that it acts on, `out` for the others."""
        if not self.enabled:
            return out
        if self.acting is None or bool(self.acting.all()):
            return update(hidden, out)
        if out.ndim != 3 or len(out) % len(self.acting):
            raise ModelError(
                "adapters cannot be chosen per prompt in a layer that mixes the rows of a batch (experts do)"
            )
        beams = len(out) // len(self.acting)
        rows = torch.nonzero(self.acting.repeat_interleave(beams).to(out.device))[:, 0]
        if len(rows) == 0:
            return out
        return out.index_copy(0, rows, update(hidden[rows], out[rows]).to(out.dtype))

    def weight(self) -> Tensor:
        """The dense update, [out, in], fp32."""
        return lowrank_weight(self.A, self.B, self.scale)

    def fold(self, weight: Tensor) -> Tensor:
        """The weight [out, in] that alone does what `weight` and the factors do together."""
        return weight + self.weight()


class AttachedFactors(Attached):
    """Factors on the linear layers `targets` (full name: module), as their submodule `slot` (or `name`)."""

    def __init__(
        self,
        name: str,
        label: str,
        model: nn.Module,
        targets: Mapping[str, nn.Module],
        settings: dict[str, Any],
        hook: Hook | None,
        slot: str | None = None,
    ) -> None:
        super().__init__(name, model)
        self._slot = slot or name
        self.embeddings = TrainedEmbeddings(model) if settings["train_embeddings"] else None
        self.targets = dict(targets)
        self.settings = settings
        self._label = label
        self._target_modules = _shortest_targets(model, targets)
        self._hooks = [layer.register_forward_hook(hook) for layer in targets.values()] if hook else []

    def factors(self) -> dict[str, LowRankFactors]:
        """The factors by the full name of their linear layer."""
        return {name: getattr(layer, self._slot) for name, layer in self.targets.items()}

    def own(self) -> set[str]:
        inside = tuple(f"{name}." for name in self.targets)
        return {name for name in self.trainable() if name.startswith(inside)}

    def detach(self) -> None:
        """Take the factors off the model."""
        for hook in self._hooks:
            hook.remove()
        for layer in self.targets.values():
            delattr(layer, self._slot)

    @contextmanager
    def edits(
        self, prompt_lengths: Tensor, prompt_starts: Tensor | None = None, **options: Unpack[EditOptions]
    ) -> Generator[None]:
        del prompt_lengths, prompt_starts
        acting = options.get("acting")
        if acting is None:
            yield
            return
        if "rows" in options:
            raise ModelError(
                "adapters of linear layers are chosen per row of a batch, not per prompt in a row"
            )
        with self._each("acting", acting):
            yield

    @contextmanager
    def disabled(self) -> Generator[None]:
        self.refuse_if_changed()
        with self._each("enabled", False):
            yield

    @contextmanager
    def _each(self, attribute: str, value: Any) -> Generator[None]:
        """An attribute of all factors has this value inside, and the one that it had again afterwards."""
        outer = [(factors, getattr(factors, attribute)) for factors in self.factors().values()]
        for factors, _ in outer:
            setattr(factors, attribute, value)
        try:
            yield
        finally:
            for factors, before in outer:
                setattr(factors, attribute, before)

    def describe(self) -> list[str]:
        line = f"{self._label} on {len(self.targets)} linear layers: {summarise_names(self.targets)}"
        return [line, self.embeddings.describe()] if self.embeddings else [line]

    def check_saved(self, config: Mapping[str, Any]) -> None:
        if self.embeddings is not None:
            self.embeddings.check_peft(config["modules_to_save"])

    def export(self) -> AdapterFiles:
        tensors: dict[str, Tensor] = {}
        for name, factors in self.factors().items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = factors.A.detach()
            tensors[f"base_model.model.{name}.lora_B.weight"] = factors.B.detach()
        if self.embeddings is not None:
            tensors |= self.embeddings.tensors("base_model.model.")
        return AdapterFiles(CONFIG_FILE, self._peft_config(), TENSORS_FILE, tensors)

    def load(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        if self.embeddings is not None:
            tensors = {name: value for name, value in tensors.items() if not _PEFT_COPY.search(name)}
        super().load(tensors, origin)

    @torch.no_grad()
    def merged_weights(self) -> Iterator[tuple[nn.Module, Tensor]]:
        """Each target layer with its whole weight after merging, [out, in], fp32; made one at a time."""
        for name, factors in self.factors().items():
            layer = self.targets[name]
            yield layer, factors.fold(dense_weight(layer))

    def _peft_config(self) -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.settings["rank"],
            "lora_alpha": self.settings["alpha"],
            "lora_dropout": self.settings["dropout"],
            "use_rslora": self.settings["rslora"],
            "target_modules": self._target_modules,
            "bias": "none",
            "fan_in_fan_out": are_transposed(self.targets),
            "inference_mode": True,
            **(self.embeddings.peft_config() if self.embeddings else {}),
        }


def update_scale(rank: int, alpha: float, rslora: bool) -> float:
    """What the update is multiplied by: alpha / rank, or alpha / sqrt(rank) (arXiv 2312.03732)."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def add_factors(layer: nn.Module, name: str, factors: LowRankFactors) -> None:
    """Hang the factors on the layer, on its device; on the CPU while the layer has no memory yet."""
    layer.add_module(name, factors.to(home(layer)))


def dense_weight(layer: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """The frozen weight that a linear layer computes with, [out, in]; a packed one is unpacked for it."""
    if isinstance(layer, PackedLinear):
        return layer.dequantise(dtype)
    weight: Any = layer.weight
    return (weight if isinstance(layer, nn.Linear) else weight.t()).detach().to(dtype)


def are_transposed(targets: Mapping[str, nn.Module]) -> bool:
    """Whether the checkpoint's weights are [in, out], as GPT-2 has them."""
    return any(
        layer.transposed if isinstance(layer, PackedLinear) else isinstance(layer, Conv1D)
        for layer in targets.values()
    )


def _shortest_targets(model: nn.Module, targets: Mapping[str, nn.Module]) -> list[str]:
    """Last names if they mean exactly these modules, to PEFT as to us; full names otherwise."""
    suffixes = {name.rpartition(".")[2] for name in targets}
    meant = {name for name in linears(model) if name.rpartition(".")[2] in suffixes}
    return sorted(suffixes) if meant == set(targets) else sorted(targets)


def is_dora(config: Mapping[str, Any]) -> bool:
    """Whether a PEFT adapter_config.json is that of a DoRA adapter."""
    return bool(config.get("use_dora"))


# Keys of PEFT that make another module of the same tensors.
_PEFT_VARIANTS = (
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
# What a PEFT configuration may say under keys that leantune has no counterpart of.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
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


def peft_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `attach` that a PEFT adapter_config.json asks for.

    Raises `CheckpointError` for PEFT features whose neglect would change the logits.
    """
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"adapter_config.json: peft_type {config.get('peft_type')!r} is not LORA")
    for key, allowed in _NEUTRAL.items():
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
        "train_embeddings": bool(config.get("modules_to_save")),
        "layers": "all" if layers is None else [layers] if isinstance(layers, int) else layers,
    }
