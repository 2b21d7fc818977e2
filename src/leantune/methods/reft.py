"""ReFT (arXiv 2404.03592): trained edits of hidden states at chosen layers and token positions.

Six methods differ in their formula only (see `ops.intervention.edit_delta`): loreft, noreft, consreft,
lobireft, direft, nodireft. An orthonormal factor R is a plain [d, r] parameter. Its gradient is projected
to the tangent space before the optimizer sees it, and its columns are made orthonormal again after the
step: no d × d tensor exists, and a forward pass uses R as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn

from leantune.config.subspaces import Subspaces
from leantune.errors import ModelError
from leantune.methods.embeddings import TrainedEmbeddings
from leantune.methods.interventions import Intervention
from leantune.methods.prompts import EditOptions, Prompts
from leantune.methods.protocol import AdapterFiles, Attached, free_name, home, named_generator
from leantune.methods.reft_places import (
    CONFIG_FILE,
    METHODS,
    TENSORS_FILE,
    Place,
    current_names,
    resolve_places,
    saved_config,
    settings_from,
)
from leantune.models.anatomy import component_of, decoder_blocks, text_config
from leantune.models.source import fingerprint
from leantune.ops.intervention import ORTHONORMAL, retract, tangent
from leantune.ops.positions import Tokens

__all__ = ["CONFIG_FILE", "METHODS", "AttachedReft", "attach", "settings_from"]

# NodiReFT is what the paper calls DiReFT; what pyreft calls DiReFT has an orthonormal factor.
LABELS = {
    "loreft": "LoReFT",
    "noreft": "NoReFT",
    "consreft": "ConsReFT",
    "lobireft": "LobiReFT",
    "direft": "DiReFT (orthonormal, as in pyreft)",
    "nodireft": "NodiReFT (DiReFT of the paper)",
}


class _Placed(NamedTuple):
    """An intervention at its place."""

    place: Place
    module: Intervention


class AttachedReft(Attached):
    """Interventions at places of a model. Names are `<layer>.<component>.<part>`."""

    edits_states = True
    always_whole = True  # columns are orthonormal to 1e-6, which neither rows nor 16 bits can express

    def __init__(
        self, method: str, model: nn.Module, placed: Sequence[_Placed], settings: dict[str, Any]
    ) -> None:
        super().__init__(method, model)
        self.embeddings = TrainedEmbeddings(model) if settings["train_embeddings"] else None
        self.settings = settings
        self.names_subspaces = bool(settings["subspaces"])
        self.markers = tuple(settings["markers"]) if settings["markers"] else None
        self._placed = {item.place.name: item for item in placed}
        self._subspaces = self._read_subspaces()
        self._prompts: Prompts | None = None
        self._frames: dict[torch.Size, Tensor] = {}  # between `before_step` and `after_step`
        self._enabled = True
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        self._hook_components()

    def interventions(self) -> dict[str, Intervention]:
        """The interventions as `<layer>.<component>.<both|first|last>`."""
        return {name: item.module for name, item in self._placed.items()}

    def own(self) -> set[str]:
        mine = {id(p) for module in self.interventions().values() for p in module.parameters()}
        return {name for name, p in self.trainable().items() if id(p) in mine}

    def decay_free(self) -> set[str]:
        return super().decay_free() | {name for name in self.own() if name.endswith(".rotation")}

    def num_edited(self, prompt_length: int) -> int | None:
        """Of the places together; None where it depends on more than the length."""
        if self.settings["generation"] != "prompt" or any(
            i.place.positions.markers for i in self._placed.values()
        ):
            return None
        prompts = Prompts(torch.tensor([prompt_length]), torch.tensor([0]), {})
        prompts.enter(1, prompt_length + 1, decoding=False)
        cpu = torch.device("cpu")
        found = [self._tokens(prompts, item.place, cpu).flat for item in self._placed.values()]
        return int(torch.count_nonzero(torch.bincount(torch.cat(found))))

    def frozen_blocks(self) -> int:
        if self.embeddings is not None:
            return 0
        return min(i.place.layer + (i.place.component == "block_output") for i in self._placed.values())

    @contextmanager
    def edits(
        self, prompt_lengths: Tensor, prompt_starts: Tensor | None = None, **options: Unpack[EditOptions]
    ) -> Generator[None]:
        starts = torch.zeros_like(prompt_lengths) if prompt_starts is None else prompt_starts
        outer, self._prompts = self._prompts, Prompts(prompt_lengths, starts, options)
        try:
            yield
        finally:
            self._prompts = outer

    @contextmanager
    def disabled(self) -> Generator[None]:
        self.refuse_if_changed()
        outer, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = outer

    def subspace_mask(self, names: Sequence[str | int]) -> Tensor:
        """The dimensions that act if these subspaces are chosen, bool [largest rank].

        Names are those of `method.subspaces`, numbers are dimensions. Raises `ModelError` for an unknown one.
        """
        try:
            return torch.tensor(self._subspaces.mask(names))
        except ValueError as error:
            raise ModelError(str(error)) from error

    def _read_subspaces(self) -> Subspaces:
        rank = max(item.place.rank for item in self._placed.values())
        try:
            return Subspaces.read(rank, self.settings["subspaces"])
        except ValueError as error:
            raise ModelError(f"method.subspaces: {error}") from error

    def _hook_components(self) -> None:
        """One hook for each module at which something is edited."""
        blocks = list(decoder_blocks(self.model).values())
        at: dict[tuple[int, str], list[_Placed]] = {}
        for item in self._placed.values():
            at.setdefault((item.place.layer, item.place.component), []).append(item)
        hidden_size = int(text_config(self.model).hidden_size)
        for (layer, component), items in at.items():
            module, _ = component_of(blocks[layer], component, hidden_size)
            if component == "block_input":
                module.register_forward_pre_hook(self._input_hook(items), with_kwargs=True)
            else:
                module.register_forward_hook(self._output_hook(items))

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """With a filled KV cache the prompts went through before; only new tokens come in."""
        if self._prompts is None:
            return
        first: Any = args[0] if args else _given(kwargs, "input_ids", "inputs_embeds")
        cache = _given(kwargs, "cache", "past_key_values")  # transformers renamed it
        filled = hasattr(cache, "get_seq_length") and int(cache.get_seq_length()) > 0
        self._prompts.enter(int(first.shape[0]), int(first.shape[1]), filled)

    def _input_hook(self, items: list[_Placed]) -> Callable[..., Any]:
        def hook(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (self._edited(items, args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": self._edited(items, kwargs["hidden_states"])}

        return hook

    def _output_hook(self, items: list[_Placed]) -> Callable[..., Any]:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
            if not isinstance(output, tuple):
                return self._edited(items, output)
            parts = cast("tuple[Any, ...]", output)
            return (self._edited(items, parts[0]), *parts[1:])

        return hook

    def _edited(self, items: list[_Placed], hidden: Tensor) -> Tensor:
        """Hidden states [B, T, d], or [B · T, d] as some MLPs have them, with their edits."""
        if not self._enabled:
            return hidden
        prompts = self._prompts
        if prompts is None:
            raise ModelError(
                "this model has ReFT interventions and does not know which prompt tokens to edit; call it "
                "inside `edits(prompt_lengths)`, or inside `disabled()` for the base model"
            )
        if hidden.ndim == 3 and prompts.shape != hidden.shape[:2]:  # a part of the model was called by itself
            prompts.enter(int(hidden.shape[0]), int(hidden.shape[1]), decoding=False)
        elif prompts.shape is None or hidden.shape[:-1].numel() != math.prod(prompts.shape):
            raise ModelError(
                f"hidden states of shape {tuple(hidden.shape)} do not show which token is which; call the "
                "whole model, or edit block_output"
            )
        edited = hidden
        with torch.autocast(hidden.device.type, enabled=False):
            for place, module in items:
                tokens = self._tokens(prompts, place, hidden.device)
                # In training a batch without such a token has gradients too, of zero: all ranks go backward.
                if len(tokens.flat) or torch.is_grad_enabled():
                    width = hidden.shape[1]
                    flat = tokens.flat
                    at = (flat // width, flat % width) if hidden.ndim == 3 else (flat,)
                    chosen = edited[at]
                    delta = self._delta(prompts, tokens, place, module, chosen)
                    edited = edited.index_put(at, chosen + delta)  # no view: FSDP2 hooks on it
        return edited

    def _delta(
        self, prompts: Prompts, tokens: Tokens, place: Place, module: Intervention, chosen_nd: Tensor
    ) -> Tensor:
        active, strength = prompts.options.get("subspaces"), prompts.options.get("strength", 1.0)
        if active is not None:
            active = nn.functional.pad(active, (0, max(0, place.rank - active.shape[1])), value=True)
            active = prompts.per_token(active[:, : place.rank], tokens)
        delta = module.delta(chosen_nd, self.settings["activation"], self.settings["dropout"], active)
        if isinstance(strength, Tensor):
            delta = delta * prompts.per_token(strength, tokens)[:, None]
        elif strength != 1.0:
            delta = delta * strength
        return delta.to(chosen_nd.dtype)

    def _tokens(self, prompts: Prompts, place: Place, device: torch.device) -> Tokens:
        generation = prompts.options.get("generation", self.settings["generation"])
        takes_new = place.part != "first" or place.positions.last == 0
        shift = int(self.settings["positions_convention"] == "pyreft-alpaca")
        return prompts.tokens(place.positions, place.part, takes_new, generation, shift, device)

    @torch.no_grad()
    def before_step(self) -> None:
        for shape, rotations in self._rotations().items():
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in rotations]
            self._frames[shape] = torch.stack(rotations)
            projected = tangent(torch.stack(gradients), self._frames[shape])
            for parameter, gradient in zip(rotations, projected, strict=True):
                parameter.grad = gradient

    @torch.no_grad()
    def after_step(self) -> None:
        for shape, rotations in self._rotations().items():
            moved = torch.stack(rotations)
            frames = retract(self._frames.pop(shape, moved), moved)
            for parameter, frame in zip(rotations, frames, strict=True):
                parameter.copy_(frame)

    def _rotations(self) -> dict[torch.Size, list[Tensor]]:
        """All orthonormal factors by shape; those of one shape are worked on at once."""
        groups: dict[torch.Size, list[Tensor]] = {}
        for module in self.interventions().values() if self.name in ORTHONORMAL else ():
            groups.setdefault(module.rotation.shape, []).append(module.rotation)
        return groups

    def describe(self) -> list[str]:
        lines: dict[tuple[Any, ...], set[int]] = {}
        for place, _ in self._placed.values():
            kind = "tied" if place.part == "both" else "untied"
            lines.setdefault((place.rank, str(place.position), kind, place.component), set()).add(place.layer)
        count = len(decoder_blocks(self.model))
        described = [
            f"{LABELS[self.name]} rank {rank}, position {position} ({kind}), at {component} of "
            + (
                f"all {count} blocks"
                if len(layers) == count
                else f"blocks {', '.join(map(str, sorted(layers)))}"
            )
            for (rank, position, kind, component), layers in lines.items()
        ]
        return [*described, self.embeddings.describe()] if self.embeddings else described

    def export(self) -> AdapterFiles:
        tensors = {
            f"{name}.{part}": parameter.detach()
            for name, module in self.interventions().items()
            for part, parameter in module.named_parameters()
        }
        if self.embeddings is not None:
            tensors |= self.embeddings.tensors()
        config = saved_config(self.name, [item.place for item in self._placed.values()], self.settings)
        config["hidden_size"] = int(text_config(self.model).hidden_size)
        config["base_fingerprint"] = fingerprint(self.model.config)
        return AdapterFiles(CONFIG_FILE, config, TENSORS_FILE, tensors)

    def load(self, tensors: Mapping[str, Tensor], origin: str) -> None:
        super().load(current_names(tensors), origin)


def _given(kwargs: Mapping[str, Any], *names: str) -> Any:
    """The argument that one of these names has; None if there is none."""
    return next((kwargs[name] for name in names if kwargs.get(name) is not None), None)


def attach(
    model: nn.Module,
    *,
    seed: int,
    method: str = "loreft",
    rank: int = 8,
    layers: str | Sequence[int] = "all",
    component: str = "block_output",
    position: str | Sequence[int] = "f7+l7",
    tied: bool = True,
    interventions: Sequence[Mapping[str, Any]] = (),
    positions_convention: str = "standard",
    generation: str = "prompt",
    dropout: float = 0.0,
    activation: str = "linear",
    projection_bias: bool = False,
    subspaces: Mapping[str, str | Sequence[int]] | None = None,
    markers: Sequence[str] | None = None,
    train_embeddings: bool = False,
) -> Attached:
    """Attach interventions of one method: one (tied) or two (untied) at a component of each chosen block.

    `interventions`: groups of places with layers, rank, component, position and tied of their own; what a
    group does not say is as above. `markers`: the two strings around the spans that the position `markers`
    means. `train_embeddings`: the embeddings and the output head are trained too.
    Raises `ModelError` for layers or components that do not exist, a place named twice, or a rank larger
    than the hidden size.
    """
    shared = {"rank": rank, "component": component, "position": position, "tied": tied}
    own = ({key: value for key, value in group.items() if value is not None} for group in interventions)
    groups = [{**shared, **group} for group in own] or [{**shared, "layers": layers}]
    blocks = decoder_blocks(model)
    slots: dict[str, nn.ModuleDict] = {}
    placed: list[_Placed] = []
    slot = free_name(blocks.values(), "reft")
    for place in resolve_places(groups, len(blocks)):
        name, block = list(blocks.items())[place.layer]
        _, dim = component_of(block, place.component, int(text_config(model).hidden_size))
        if place.rank > dim:
            raise ModelError(f"method.rank: {place.rank} is more than the hidden size {dim} of {place.name}")
        generator = named_generator(seed, f"{name}.{place.component}.{place.part}")
        module = Intervention(method, dim, place.rank, generator, projection_bias).to(home(block))
        if name not in slots:
            slots[name] = nn.ModuleDict()
            block.add_module(slot, slots[name])
        slots[name][f"{place.component}_{place.part}"] = module
        placed.append(_Placed(place, module))
    settings = {
        "positions_convention": positions_convention,
        "generation": generation,
        "dropout": dropout,
        "activation": activation,
        "projection_bias": projection_bias,
        "subspaces": dict(subspaces or {}),
        "markers": list(markers) if markers else None,
        "train_embeddings": train_embeddings,
    }
    return AttachedReft(method, model, placed, settings)
