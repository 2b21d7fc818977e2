"""One intervention: its parameters, how they start, and what it adds to hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leantune.ops.intervention import CONSTANT, ORTHONORMAL, edit_delta, orthonormalise


class Intervention(nn.Module):
    """An intervention of some kind (see `ops.intervention.edit_delta`); its parameters are fp32.

    An orthonormal factor is a plain [d, r] parameter, used as it is by every forward pass: it is put back
    on the manifold once an optimizer step. W, b and P start as a default linear layer, constants uniform
    in [0, 1), as in pyreft.
    """

    def __init__(
        self, kind: str, dim: int, rank: int, generator: torch.Generator, projection_bias: bool = False
    ) -> None:
        super().__init__()
        self.kind = kind
        bound = dim**-0.5  # that of a default linear layer

        def uniform(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))

        if kind in ORTHONORMAL:
            start = torch.randn(dim, rank, generator=generator, dtype=torch.float64)
            self.rotation = nn.Parameter(orthonormalise(start).float())
        else:
            self.projection = uniform(rank, dim)
        if projection_bias:
            self.projection_bias = uniform(rank)
        if kind in CONSTANT:
            self.constant = nn.Parameter(torch.rand(rank, generator=generator))
        else:
            self.weight = uniform(rank, dim)
            self.bias = uniform(rank)

    @property
    def rank(self) -> int:
        """Dimensions of the subspace."""
        return next(p for p in self.parameters() if p.ndim == 1).shape[0]

    def delta(
        self, hidden_nd: Tensor, activation: str, dropout: float, active_nr: Tensor | None = None
    ) -> Tensor:
        """What the intervention adds to n hidden states; dropout acts on the whole edited state."""
        parameters = cast("Mapping[str, Tensor]", dict(self.named_parameters(recurse=False)))
        hidden = hidden_nd.to(next(iter(parameters.values())).dtype)
        delta = edit_delta(self.kind, hidden, parameters, activation, active_nr)
        if self.training and dropout > 0:
            delta = F.dropout(hidden + delta, dropout) - hidden
        return delta
