"""The low-rank product of LoRA (arXiv 2106.09685, section 4.1): y + scale · B A x."""

from __future__ import annotations

import torch
from torch import Tensor


def add_lowrank(out: Tensor, hidden: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """`out + scale * (hidden @ a.T) @ b.T`.

    out: [..., d_out]; hidden: [..., d_in]; a: [r, d_in]; b: [d_out, r]. The last product
    and the sum are one kernel.
    """
    inner = hidden.flatten(0, -2) @ a.t()
    return torch.addmm(out.flatten(0, -2), inner, b.t(), alpha=scale).view(out.shape)


def lowrank_weight(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The dense update `scale * b @ a`, [d_out, d_in], as it is added when merging."""
    return scale * (b @ a)
