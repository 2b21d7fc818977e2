"""Edits of hidden states (ReFT, arXiv 2404.03592) and their orthonormal factor.

Legend: n edited positions, d hidden size, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def loreft_delta(
    hidden_nd: Tensor, rotation_dr: Tensor, weight_rd: Tensor, bias_r: Tensor, activation: str = "linear"
) -> Tensor:
    """What LoReFT adds to the hidden states: R (act(W h + b) - Rᵀ h), equation 3 of the paper. [n, d]"""
    source = ACTIVATIONS[activation](F.linear(hidden_nd, weight_rd, bias_r))
    return (source - hidden_nd @ rotation_dr) @ rotation_dr.t()


@torch.no_grad()
def orthonormalise(matrix_dr: Tensor) -> Tensor:
    """The columns made orthonormal by two rounds of Cholesky QR: r × r work, no d × d tensor.

    Works on [d, r] or on a stack [..., d, r], in float64: sums of d squares in fp32 are off by
    2e-6 at d = 4096. The second round brings the error of an ill-conditioned input down to
    rounding. Raises `torch.linalg.LinAlgError` if the columns are linearly dependent.
    """
    linalg: Any = torch.linalg  # it comes without types
    frame_dr = matrix_dr.double()
    for _ in range(2):
        factor: Tensor = linalg.cholesky(frame_dr.mT @ frame_dr)
        columns_rd: Tensor = linalg.solve_triangular(factor, frame_dr.mT, upper=False)
        frame_dr = columns_rd.mT
    return frame_dr.to(matrix_dr.dtype).contiguous()


@torch.no_grad()
def tangent(gradient_dr: Tensor, rotation_dr: Tensor) -> Tensor:
    """The gradient on the manifold of orthonormal frames: G - R sym(Rᵀ G), of one or a stack.

    It has no part that would only stretch or shear the frame (Edelman, Arias and Smith
    1998, equation 2.53 with the embedded metric).
    """
    inner = rotation_dr.mT @ gradient_dr
    return gradient_dr - rotation_dr @ (0.5 * (inner + inner.mT))
