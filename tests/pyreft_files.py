"""Folders as pyreft saves them, built of the modules that its classes hold, and what these compute."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"linear": lambda x: x, "relu": torch.relu}
_REPEATED = ("embed_dim", "interchange_dim")


class _Rotate(nn.Module):
    def __init__(self, dim: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(dim, rank)))


def rotate_layer(dim: int, rank: int, *, trivialization: bool = True) -> nn.Module:
    """A layer with torch's orthogonal parametrisation, moved away from its start as training does."""
    layer = parametrizations.orthogonal(_Rotate(dim, rank), use_trivialization=trivialization)
    with torch.no_grad():
        original: Any = layer.parametrizations.weight.original  # type: ignore[union-attr]
        original.add_(torch.randn(dim, rank).tril(diagonal=-1) * 0.1)
    return layer


class Saved(nn.Module):
    """One intervention with the parameters and buffers that pyreft's class of this kind has."""

    def __init__(
        self,
        kind: str,
        dim: int = 32,
        rank: int = 4,
        *,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        act: str = "linear",
    ) -> None:
        super().__init__()
        self.kind, self.dim, self.rank, self.act = kind, dim, rank, ACTIVATIONS[act]
        for name in _REPEATED:
            self.register_buffer(name, torch.tensor(dim))
        if kind in ("noreft", "nodireft"):
            self.proj_layer = nn.Linear(dim, rank, bias=bias).to(dtype)
        else:
            self.rotate_layer: Any = rotate_layer(dim, rank)
        if kind in ("consreft", "lobireft"):
            self.learned_source: Any = nn.Parameter(torch.rand(rank))
        else:
            self.learned_source = nn.Linear(dim, rank).to(dtype)

    def payload(self) -> dict[str, Tensor]:
        """What its file holds: LoReFT replaces the parametrisation by the matrix it stands for."""
        if self.kind != "loreft":
            return self.state_dict()
        return {**self.learned_source.state_dict(), "rotate_layer": self.rotate_layer.weight.data}

    @torch.no_grad()
    def forward(self, hidden: Tensor) -> Tensor:
        """The formula of the kind, in fp32."""
        constant = self.kind in ("consreft", "lobireft")
        source = self.learned_source if constant else self.act(self.learned_source.float()(hidden))
        if self.kind in ("noreft", "nodireft"):
            factor, inside = self.proj_layer.float().weight, self.proj_layer(hidden)
        else:
            factor, inside = self.rotate_layer.weight.T, hidden @ self.rotate_layer.weight
        replaces = self.kind in ("loreft", "noreft", "consreft")
        return hidden + (source - inside if replaces else source) @ factor


Places = Sequence[tuple[int, str, Saved]]


def save_like_pyreft(
    folder: Path,
    places: Places,
    *,
    old_keys: bool = False,
    values: int = 14,
    config: bool = True,
    **changes: Any,
) -> Path:
    """Write what pyreft's `save` (or, without config, its trainer) writes; `changes` to the config win.

    values: length of each representation's list, shorter in older versions; components may be paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    keys: list[str] = []
    lists: list[list[Any]] = []
    for layer, component, intervention in places:
        path = "." in component
        key = (
            f"comp.{component}.unit.pos.nunit.1"
            if path
            else f"layer.{layer}.comp.{component}.unit.pos.nunit.1"
        )
        keys.append(f"{key if old_keys else key.replace('.', '_')}#{counts[key]}")
        counts[key] += 1
        lists.append([0 if path else layer, component, "pos", 1, intervention.rank, *[None] * 9][:values])
        torch.save(intervention.payload(), folder / f"intkey_{keys[-1]}.bin")
    if config:
        content = {
            "intervention_constant_sources": [True] * len(places),
            "intervention_dimensions": [saved.dim for _, _, saved in places],
            "intervention_types": [spelled(saved.kind) for _, _, saved in places],
            "mode": "parallel",
            "model_type": "<class 'transformers.models.llama.modeling_llama.LlamaForCausalLM'>",
            "representations": lists,
            "sorted_keys": keys,
            "transformers_version": "4.45.1",
            **changes,
        }
        (folder / "config.json").write_text(json.dumps(content))
    return folder


def spelled(kind: str) -> str:
    """The class of a kind as config.json names it."""
    return f"<class 'pyreft.interventions.{kind.capitalize()}Intervention'>"


@torch.no_grad()
def edited_logits(
    model: Any, input_ids: Tensor, edits: Sequence[tuple[nn.Module, Sequence[int], Saved]]
) -> Tensor:
    """Logits of a model where the outputs of modules are edited at these columns of every row."""

    def hook(columns: Sequence[int], intervention: Saved) -> Callable[..., Any]:
        def edit(_module: nn.Module, _args: Any, output: Any) -> Any:
            hidden = (output[0] if isinstance(output, tuple) else output).clone()
            hidden[:, list(columns)] = intervention(hidden[:, list(columns)])
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return edit

    handles = [module.register_forward_hook(hook(columns, saved)) for module, columns, saved in edits]
    try:
        return model(input_ids=input_ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
