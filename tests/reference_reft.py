"""LoReFT as the paper's authors compute it: torch's orthogonal parametrisation, hooks, one token at a time.

Written for comparison alone: nothing of leantune computes anything in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal


class _Frame(nn.Module):
    """Holds the [d, r] matrix that the parametrisation is put on."""

    def __init__(self, frame_dr: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(frame_dr.detach().clone())


class ReferenceLoreft(nn.Module):
    """h + R (W h + b - Rᵀ h) with R evaluated through `torch.nn.utils.parametrizations.orthogonal`."""

    def __init__(self, frame_dr: Tensor, weight_rd: Tensor, bias_r: Tensor) -> None:
        super().__init__()
        self.frame = orthogonal(_Frame(frame_dr))
        rank, dim = weight_rd.shape
        self.source = nn.Linear(dim, rank, device=weight_rd.device, dtype=weight_rd.dtype)
        self.source.load_state_dict({"weight": weight_rd, "bias": bias_r})
        self.evaluated: list[Tensor] = []  # R at each use of the last forward pass

    def forward(self, hidden_nd: Tensor) -> Tensor:
        frame: Tensor = self.frame.weight
        if frame.requires_grad:
            frame.retain_grad()
            self.evaluated.append(frame)
        return hidden_nd + (self.source(hidden_nd) - hidden_nd @ frame) @ frame.T

    def frame_gradient(self) -> Tensor:
        """The gradient of the loss with respect to the evaluated R, [d, r]."""
        return torch.stack([f.grad for f in self.evaluated if f.grad is not None]).sum(dim=0)


class ReferenceModel(nn.Module):
    """A frozen causal model with f1+l1-like edits of block outputs: `parts` by (layer, both|first|last)."""

    def __init__(
        self, model: Any, parts: Mapping[tuple[int, str], ReferenceLoreft], first: int, last: int
    ) -> None:
        super().__init__()
        self.model = model
        self.parts = dict(parts)
        self.trained = nn.ModuleList(parts.values())
        self.first, self.last = first, last
        self.prompt_lengths: list[int] = []
        for layer in sorted({layer for layer, _ in parts}):
            model.model.layers[layer].register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Any:
        def hook(_block: nn.Module, _args: Any, hidden_BTD: Tensor) -> Tensor:
            rows = [
                self._row(layer, row, length)
                for row, length in zip(hidden_BTD, self.prompt_lengths, strict=True)
            ]
            return torch.stack(rows)

        return hook

    def _row(self, layer: int, row_TD: Tensor, length: int) -> Tensor:
        tokens = list(row_TD.unbind())
        num_first, num_last = min(length // 2, self.first), min(length // 2, self.last)
        for end, columns in (
            ("first", range(num_first)),
            ("last", range(length - num_last, length)),
        ):
            part = self.parts.get((layer, "both")) or self.parts[layer, end]
            for column in columns:
                tokens[column] = part(row_TD[column][None])[0]
        return torch.stack(tokens)

    def mean_loss(self, input_ids_BT: Tensor, targets_BT: Tensor, prompt_lengths: list[int]) -> Tensor:
        """Mean cross-entropy of the next token where the target is not -100, over all logits."""
        self.prompt_lengths = prompt_lengths
        for part in self.parts.values():
            part.evaluated.clear()
        logits: Tensor = self.model(input_ids=input_ids_BT, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=-100)


def reference_of(attached: Any, model: Any, first: int, last: int) -> ReferenceModel:
    """The same interventions, with the same values, on a model of its own."""
    parts: dict[tuple[int, str], ReferenceLoreft] = {}
    for name, module in attached.interventions().items():
        layer, _, part = name.split(".")
        parts[int(layer), part] = ReferenceLoreft(
            *(p.detach() for p in (module.rotation, module.weight, module.bias))
        )
    return ReferenceModel(model, parts, first, last)


def reference_loss(reference: ReferenceModel, batch: Any) -> Tensor:
    """The mean loss of a `MicroBatch`'s labelled tokens."""
    targets = torch.full_like(batch.input_ids, -100)
    targets.view(-1)[batch.label_index] = batch.labels
    return reference.mean_loss(batch.input_ids, targets, batch.prompt_lengths.tolist())


def learn_reference(reference: ReferenceModel, batches: Sequence[Any], rates: Sequence[float]) -> list[float]:
    """One AdamW step without decay for each batch; the loss of each before its step."""
    reference.model.train()
    optimizer = torch.optim.AdamW(reference.trained.parameters(), weight_decay=0.0)
    losses: list[float] = []
    for batch, rate in zip(batches, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        loss = reference_loss(reference, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
