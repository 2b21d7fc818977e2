"""Edits of hidden states (ReFT, arXiv 2404.03592) and their orthonormal factor.

Legend: n edited positions, d hidden size, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


# Kinds whose factor has orthonormal columns; that of the others is free.
ORTHONORMAL = frozenset({"loreft", "consreft", "lobireft", "direft"})
# Kinds that replace the state inside the subspace; the others add to it.
_REPLACING = frozenset({"loreft", "noreft", "consreft"})
# Kinds whose source does not depend on the state.
CONSTANT = frozenset({"consreft", "lobireft"})
KINDS = ("loreft", "noreft", "consreft", "lobireft", "direft", "nodireft")


def edit_delta(
    kind: str,
    hidden_nd: Tensor,
    parameters: Mapping[str, Tensor],
    activation: str = "linear",
    active_nr: Tensor | None = None,
) -> Tensor:
    """What an intervention adds to the hidden states, [n, d].

    | kind     | added                    |
    |----------|--------------------------|
    | loreft   | R (act(W h + b) - Rᵀ h)  |
    | noreft   | Pᵀ (act(W h + b) - P h)  |
    | consreft | R (c - Rᵀ h)             |
    | lobireft | R c                      |
    | direft   | R act(W h + b)           |
    | nodireft | Pᵀ act(W h + b)          |

    Equation 3 of the paper is loreft, its DiReFT (section 3.2) is nodireft; the others are named as in
    pyreft. parameters: `rotation` R [d, r] or `projection` P [r, d]; `weight` W [r, d] and `bias` b [r], or
    `constant` c [r]; noreft may have a `projection_bias` [r], added to P h. active_nr: which dimensions of
    the subspace act on each state (default: all).
    """
    frame_dr = parameters["rotation"] if kind in ORTHONORMAL else parameters["projection"].t()
    if kind in CONSTANT:
        source = parameters["constant"].expand(len(hidden_nd), -1)
    else:
        source = ACTIVATIONS[activation](F.linear(hidden_nd, parameters["weight"], parameters["bias"]))
    if kind in _REPLACING:
        source = source - hidden_nd @ frame_dr
        if "projection_bias" in parameters:
            source = source - parameters["projection_bias"]
    if active_nr is not None:
        source = source * active_nr
    return source @ frame_dr.t()


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


@torch.no_grad()
def retract(frame_dr: Tensor, moved_dr: Tensor) -> Tensor:
    """The frame that an optimizer step from `frame_dr` to a matrix beside it leads to, of one or a stack.

    It goes twice as far. Torch's `orthogonal`, which pyreft trains, is made of reflections I - 2 v vᵀ, so
    that R moves by twice the change of v: a learning rate means the same here.
    """
    return orthonormalise(2.0 * moved_dr - frame_dr)
