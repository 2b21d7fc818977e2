"""The linear product with a weight that is kept packed, and unpacked anew in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

# (dtype, *packed tensors) -> the weight [out, in] in that dtype
Unpack = Callable[..., Tensor]


class _PackedLinear(torch.autograd.Function):
    """Saves the packed tensors alone: what autograd would save for a plain product is the dense weight."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, bias: Tensor | None, unpack: Unpack, *packed: Tensor) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        if ctx.needs_input_grad[0]:
            # The very tensors, no views of them: FSDP2 frees their storage and fills it again for backward.
            ctx.save_for_backward(*packed)
        ctx.unpack, ctx.dtype = unpack, dtype
        return functional.linear(
            hidden.to(dtype), unpack(dtype, *packed), None if bias is None else bias.to(dtype)
        )

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_out = grad_outputs[0]
        grad_hidden = grad_bias = None
        packed: tuple[Tensor, ...] = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            weight: Tensor = ctx.unpack(ctx.dtype, *packed)
            grad_hidden = grad_out.to(ctx.dtype) @ weight
        if ctx.needs_input_grad[1]:
            grad_bias = grad_out.reshape(-1, grad_out.shape[-1]).sum(0)
        # Autograd itself casts a gradient to the dtype of its input.
        return (grad_hidden, grad_bias, *(None for _ in ctx.needs_input_grad[2:]))


def packed_linear(hidden: Tensor, unpack: Unpack, packed: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """`hidden @ W.T + bias` with W = `unpack(dtype, *packed)`, [out, in]; the weight itself gets no gradient.

    hidden: float [..., in]; returns [..., out], in autocast's dtype where autocast is on for the
    device, else in that of `hidden`. W lives during the product only; backward unpacks it again.
    `unpack` must be a pure function of what it is given.
    """
    return _PackedLinear.apply(hidden, bias, unpack, *packed)  # pyright: ignore[reportReturnType]


def to_bytes(values: Tensor) -> Tensor:
    """float32 [..., n] (or a scalar) as its bytes, uint8 [..., 4 n] ([4]).

    A module's floating-point tensors are cast by `module.to(dtype)` and by mixed-precision
    policies; bytes are not, so what must stay float32 is registered as bytes.
    """
    values = values.float().contiguous()
    return (values if values.ndim else values.reshape(1)).view(torch.uint8)


def from_bytes(stored: Tensor) -> Tensor:
    """float32 [..., n] out of its bytes, uint8 [..., 4 n]: the same memory where it is aligned."""
    if stored.storage_offset() % 4 or not stored.is_contiguous():
        stored = stored.clone(memory_format=torch.contiguous_format)
    return stored.view(torch.float32)
