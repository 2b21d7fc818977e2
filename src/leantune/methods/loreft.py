"""LoReFT (arXiv 2404.03592): h + R (act(W h + b) - Rᵀ h) on chosen prompt tokens of chosen blocks.

The orthonormal factor R is a plain [d, r] parameter. Its gradient is projected to the
tangent space before the optimizer sees it, and its columns are made orthonormal again
after the step: no d × d tensor exists, and a forward pass uses R as it is.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leantune.config.layers import parse_layers, parse_position
from leantune.errors import CheckpointError, ModelError
from leantune.methods.embeddings import TrainedEmbeddings
from leantune.methods.protocol import AdapterFiles, Attached, home, named_generator
from leantune.models.anatomy import decoder_blocks, select_blocks, text_config
from leantune.models.source import fingerprint
from leantune.ops.intervention import loreft_delta, orthonormalise, tangent
from leantune.ops.positions import edited_positions

CONFIG_FILE = "reft_config.json"
TENSORS_FILE = "reft.safetensors"
FORMAT_VERSION = 1


class LoreftIntervention(nn.Module):
    """One intervention. rotation: [d, r], orthonormal columns; weight: [r, d]; bias: [r]; all fp32."""

    def __init__(self, dim: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rotation = orthonormalise(torch.randn(dim, rank, generator=generator, dtype=torch.float64))
        bound = dim**-0.5  # that of a default linear layer
        self.rotation = nn.Parameter(rotation.float())
        self.weight = nn.Parameter(torch.empty(rank, dim).uniform_(-bound, bound, generator=generator))
        self.bias = nn.Parameter(torch.empty(rank).uniform_(-bound, bound, generator=generator))

    def delta(self, hidden_nd: Tensor, activation: str, dropout: float) -> Tensor:
        """What the intervention adds to n hidden states; dropout acts on the whole edited state."""
        hidden = hidden_nd.to(self.weight.dtype)
        delta = loreft_delta(hidden, self.rotation, self.weight, self.bias, activation)
        if self.training and dropout > 0:
            delta = F.dropout(hidden + delta, dropout) - hidden
        return delta.to(hidden_nd.dtype)


@dataclass
class _Prompts:
    """The prompts that the forward passes of one `edits` context work on."""

    lengths_B: Tensor
    starts_B: Tensor
    widest: int
    decoding: bool = False
    shape: tuple[int, int] | None = None
    spans: tuple[Tensor, Tensor] | None = None


class AttachedLoreft(Attached):
    """LoReFT at the outputs of `blocks` (full name: block)."""

    always_whole = True
    always_fp32 = True  # columns are orthonormal to 1e-6, which 16 bits cannot express

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], settings: dict[str, Any]) -> None:
        super().__init__("loreft", model)
        self.embeddings = TrainedEmbeddings(model) if settings["train_embeddings"] else None
        self.blocks = dict(blocks)
        self.settings = settings
        self.first, self.last = parse_position(settings["position"])
        self._prompts: _Prompts | None = None
        self._enabled = True
        self._interventions = self._named_interventions()
        model.register_forward_pre_hook(self._note_cache, with_kwargs=True)
        for block in self.blocks.values():
            block.register_forward_hook(self._edit_output)

    def interventions(self) -> dict[str, LoreftIntervention]:
        """The interventions as `<layer>.<both|first|last>`."""
        return dict(self._interventions)

    def _named_interventions(self) -> dict[str, LoreftIntervention]:
        layer_of = {id(block): index for index, block in enumerate(decoder_blocks(self.model).values())}
        found: dict[str, LoreftIntervention] = {}
        for block in self.blocks.values():
            parts: Any = block.reft
            found |= {f"{layer_of[id(block)]}.{part}": module for part, module in parts.items()}
        return found

    def decay_free(self) -> set[str]:
        return super().decay_free() | {name for name in self.trainable() if name.endswith(".rotation")}

    def num_edited(self, prompt_length: int) -> int:
        half = prompt_length // 2
        return min(half, self.first) + min(half, self.last)

    @contextmanager
    def edits(self, prompt_lengths: Tensor, prompt_starts: Tensor | None = None) -> Generator[None]:
        starts = torch.zeros_like(prompt_lengths) if prompt_starts is None else prompt_starts
        widest = int((starts + prompt_lengths).max())
        outer, self._prompts = self._prompts, _Prompts(prompt_lengths, starts, widest)
        try:
            yield
        finally:
            self._prompts = outer

    @contextmanager
    def disabled(self) -> Generator[None]:
        self.refuse_if_changed()
        self._enabled = False
        try:
            yield
        finally:
            self._enabled = True

    def _note_cache(self, _module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """With a filled KV cache the prompt has been edited already; only new tokens come in."""
        if self._prompts is not None:
            cache: Any = kwargs.get("past_key_values")
            self._prompts.decoding = hasattr(cache, "get_seq_length") and int(cache.get_seq_length()) > 0

    def _edit_output(self, block: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        if not self._enabled:
            return output
        if self._prompts is None:
            raise ModelError(
                "this model has ReFT interventions and does not know which prompt tokens to edit; call it "
                "inside `edits(prompt_lengths)`, or inside `disabled()` for the base model"
            )
        bare = not isinstance(output, tuple)
        parts = cast("tuple[Any, ...]", (output,) if bare else output)
        hidden_BTD: Tensor = parts[0]
        width, widest = hidden_BTD.shape[1], self._prompts.widest
        if self._prompts.decoding or width == 1:  # a prompt of one token is never edited
            return output
        if width < widest:
            raise ModelError(
                f"the input is {width} tokens wide, but `edits` was told of prompts that reach token {widest}"
                "; give the lengths (and starts) of the prompts in this batch"
            )
        edited = self._edit(block, hidden_BTD)
        return edited if bare else (edited, *parts[1:])

    def _edit(self, block: nn.Module, hidden_BTD: Tensor) -> Tensor:
        first, last = self._spans(hidden_BTD)
        groups = (
            [("both", torch.cat([first, last]))]
            if self.settings["tied"]
            else [("first", first), ("last", last)]
        )
        parts: Any = block.reft
        edited_BTD = hidden_BTD
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            for part, index in groups:
                if part in parts and len(index):
                    place = (index // hidden_BTD.shape[1], index % hidden_BTD.shape[1])
                    chosen = edited_BTD[place]
                    delta = parts[part].delta(chosen, self.settings["activation"], self.settings["dropout"])
                    edited_BTD = edited_BTD.index_put(place, chosen + delta)  # no view: FSDP2 hooks on it
        return edited_BTD

    def _spans(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        assert self._prompts is not None
        prompts = self._prompts
        batch, width = hidden_BTD.shape[:2]
        if prompts.spans is None or prompts.shape != (batch, width):
            prompts.shape = (batch, width)
            lengths, starts = prompts.lengths_B, prompts.starts_B
            if batch % len(lengths):
                raise ModelError(f"a batch of {batch} sequences does not belong to {len(lengths)} prompts")
            lengths = lengths.repeat_interleave(batch // len(lengths))  # beams of one prompt are neighbours
            starts = starts.repeat_interleave(batch // len(starts))
            spans = edited_positions(lengths, starts, width, self.first, self.last)
            prompts.spans = (spans[0].to(hidden_BTD.device), spans[1].to(hidden_BTD.device))
        return prompts.spans

    @torch.no_grad()
    def before_step(self) -> None:
        rotations = self._rotations()
        gradients = torch.stack([p.grad if p.grad is not None else torch.zeros_like(p) for p in rotations])
        for parameter, projected in zip(rotations, tangent(gradients, torch.stack(rotations)), strict=True):
            parameter.grad = projected

    @torch.no_grad()
    def after_step(self) -> None:
        rotations = self._rotations()
        for parameter, frame in zip(rotations, orthonormalise(torch.stack(rotations)), strict=True):
            parameter.copy_(frame)

    def _rotations(self) -> list[Tensor]:
        """All orthonormal factors; they have one shape, so all are worked on at once."""
        return [module.rotation for module in self._interventions.values()]

    def describe(self) -> list[str]:
        layers = sorted({int(name.partition(".")[0]) for name in self.interventions()})
        kind = "tied" if self.settings["tied"] else "untied"
        everywhere = len(layers) == len(decoder_blocks(self.model))
        where = f"all {len(layers)} blocks" if everywhere else f"blocks {', '.join(map(str, layers))}"
        line = (
            f"LoReFT rank {self.settings['rank']}, position {self.settings['position']} ({kind}), "
            f"at the outputs of {where}"
        )
        return [line, self.embeddings.describe()] if self.embeddings else [line]

    def export(self) -> AdapterFiles:
        interventions = self.interventions()
        tensors = {
            f"{name}.{part}": parameter.detach()
            for name, module in interventions.items()
            for part, parameter in module.named_parameters()
        }
        if self.embeddings is not None:
            tensors |= self.embeddings.tensors()
        config: dict[str, Any] = {
            "format": "leantune-reft",
            "format_version": FORMAT_VERSION,
            "method": "loreft",
            **self.settings,
            "layers": sorted({int(name.partition(".")[0]) for name in interventions}),
            "component": "block_output",
            "hidden_size": int(text_config(self.model).hidden_size),
            "dtype": "float32",
            "base_fingerprint": fingerprint(self.model.config),
        }
        return AdapterFiles(CONFIG_FILE, config, TENSORS_FILE, tensors)


def attach(
    model: nn.Module,
    *,
    seed: int,
    rank: int = 8,
    layers: str | Sequence[int] = "all",
    position: str = "f7+l7",
    tied: bool = True,
    dropout: float = 0.0,
    activation: str = "linear",
    train_embeddings: bool = False,
) -> Attached:
    """Attach one LoReFT intervention (tied) or two (untied) to the output of each chosen block.

    `train_embeddings`: the embeddings and the output head are trained too. Raises `ModelError` for layers
    that do not exist or a rank larger than the hidden size.
    """
    blocks = select_blocks(model, parse_layers(layers))
    dim = int(text_config(model).hidden_size)
    if rank > dim:
        raise ModelError(f"method.rank: {rank} is more than the model's hidden size {dim}")
    first, last = parse_position(position)
    parts = ["both"] if tied else [part for part, count in (("first", first), ("last", last)) if count]
    for name, block in blocks.items():
        modules = {
            part: LoreftIntervention(dim, rank, named_generator(seed, f"{name}.{part}")) for part in parts
        }
        block.add_module("reft", nn.ModuleDict(modules).to(home(block)))
    settings = {
        "rank": rank,
        "position": position,
        "tied": tied,
        "dropout": dropout,
        "activation": activation,
        "train_embeddings": train_embeddings,
    }
    return AttachedLoreft(model, blocks, settings)


def settings_from(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `attach` that a saved reft_config.json asks for."""
    if config.get("format") != "leantune-reft" or config.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"reft_config.json: format {config.get('format')!r} version {config.get('format_version')!r} "
            f"is not leantune-reft version {FORMAT_VERSION}"
        )
    keys = ("rank", "layers", "position", "tied", "dropout", "activation")
    absent = [key for key in keys if key not in config]
    if absent:
        raise CheckpointError(f"reft_config.json: {absent[0]} is missing; it is no complete adapter")
    # Adapters of before there was such a setting do not have the key.
    embeddings = bool(config.get("train_embeddings", False))
    return {**{key: config[key] for key in keys}, "train_embeddings": embeddings}
