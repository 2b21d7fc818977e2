"""The arithmetic of DoRA (arXiv 2402.09353): W' = m ⊙ (W + s·BA) / ‖W + s·BA‖, norms over each row.

The sum W + s·BA is never formed: ‖w + s·bA‖² = ‖w‖² + 2s·b·(A w) + s²·b (A Aᵀ) bᵀ for a row w of
W and the row b of B that belongs to it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_norms(weight: Tensor) -> Tensor:
    """The length of each row of a weight [out, in]: [out], in float32 or wider."""
    # Contiguous, so that a transposed weight's norms are summed in the same order, to the same last bit.
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32)).contiguous()
    return wide.norm(dim=1)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def updated_row_norms(stored: Tensor, cross: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The row norms of W + scale·BA, [out].

    stored: the row norms of W, [out]; cross: W Aᵀ, [out, r]; a: [r, in]; b: [out, r]. With b = 0 the
    result is `stored` to the bit: squares of float32 numbers are exact in float64, so the root of
    one is the number again, however small or large it is.
    """
    linear = (b * cross).sum(dim=1, dtype=torch.float64)
    quadratic = ((b @ (a @ a.t())) * b).sum(dim=1, dtype=torch.float64)
    squares = stored.double().square() + 2.0 * scale * linear + scale**2 * quadratic
    # Where the update cancels a row, rounding can leave a little less than nothing.
    return squares.clamp_min(0.0).sqrt().to(stored.dtype)


def dora_gain(magnitude: Tensor, norms: Tensor) -> Tensor:
    """magnitude / norms, [out]; 1 where the norm is zero, since such a row has no direction to scale."""
    empty = norms == 0
    return torch.where(empty, 1.0, magnitude / norms.masked_fill(empty, 1.0))


def rescale(out: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """`gain ⊙ (out - bias) + bias` for out [..., d_out] that already holds the bias [d_out].

    Written so that a gain of exactly 1 gives `out` to the bit. The product is formed in the gain's
    dtype, float32 or wider: near 1, bfloat16 knows only steps of 1/128. Returns the dtype of `out`.
    """
    scaled = out * gain
    if bias is not None:
        scaled = scaled + (1.0 - gain) * bias
    return scaled.to(out.dtype)
