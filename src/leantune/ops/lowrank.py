"""The low-rank product of LoRA (arXiv 2106.09685, section 4.1): y + scale · B A dropout(x)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _AddLowRank(torch.autograd.Function):
    """Saves the input, which neighbouring layers share, and one byte a value of dropout's mask.

    What autograd would save besides: the input after dropout, one for each layer, and B's input.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, hidden: Tensor, a: Tensor, b: Tensor, scale: float, dropout: float
    ) -> Tensor:
        mask = torch.empty_like(hidden, dtype=torch.bool).bernoulli_(1.0 - dropout) if dropout else None
        ctx.save_for_backward(hidden, a, b, mask)
        ctx.scale, ctx.dropout, ctx.dtype = scale, dropout, out.dtype
        inner = _dropped(hidden, mask, dropout).to(out.dtype) @ a.to(out.dtype).t()
        return torch.addmm(out, inner, b.to(out.dtype).t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad_outputs[0]
        hidden, a, b, mask = ctx.saved_tensors
        dtype: torch.dtype = ctx.dtype
        kept = _dropped(hidden, mask, ctx.dropout).to(dtype)
        grad_inner = (grad @ b.to(dtype)).mul_(ctx.scale)
        grad_b = (grad.t() @ (kept @ a.to(dtype).t())).mul_(ctx.scale)
        grad_a = grad_inner.t() @ kept
        grad_hidden = None
        if ctx.needs_input_grad[1]:
            grad_hidden = _dropped(grad_inner @ a.to(dtype), mask, ctx.dropout)
        return grad, grad_hidden, grad_a, grad_b, None, None


def _dropped(values: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    return values if mask is None else (values * mask).mul_(1.0 / (1.0 - dropout))


def add_lowrank(
    out: Tensor, hidden: Tensor, a: Tensor, b: Tensor, scale: float, dropout: float = 0.0
) -> Tensor:
    """`out + scale * (dropout(hidden) @ a.T) @ b.T`, computed in the dtype of `out`.

    out: [..., d_out]; hidden: [..., d_in]; a: [r, d_in]; b: [d_out, r].
    """
    return _AddLowRank.apply(out.flatten(0, -2), hidden.flatten(0, -2), a, b, scale, dropout).view(out.shape)


def lowrank_weight(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The dense update `scale * b @ a`, [d_out, d_in], as it is added when merging."""
    return scale * (b @ a)
