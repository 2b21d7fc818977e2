"""Weights quantised to 8, 4, 3 or 2 bits by half-quadratic quantisation (HQQ); needs no other package.

Per weight: the bits of its code, and 64 / group_size bits for the scale and the zero of its group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from leantune.bases.packing import replace_linears
from leantune.errors import ModelError
from leantune.models.packed import PackedLinear
from leantune.ops.hqq import PACKED_TOGETHER, bytes_per_row, dequantise, quantise
from leantune.ops.packed import from_bytes, packed_linear, to_bytes


class HqqLinear(PackedLinear):
    """A linear layer whose weight is stored as codes, and a scale and a zero for each group of a row.

    codes: uint8 [out, in * bits / 8]. scales, zeros: float32 [out, in / group_size], kept as the
    uint8 bytes [out, 4 * in / group_size] they consist of, so that neither `model.to(dtype)` nor a
    mixed-precision policy can round them.
    """

    packed_names = ("codes", "scales", "zeros")
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: nn.Parameter | None,
        transposed: bool,
        *,
        bits: int,
        group_size: int,
    ) -> None:
        super().__init__(in_features, out_features, bias, transposed)
        self.bits = bits
        self.group_size = group_size
        group_bytes = 4 * (in_features // group_size)
        self.codes = _meta_bytes(out_features, bytes_per_row(in_features, bits))
        self.scales = _meta_bytes(out_features, group_bytes)
        self.zeros = _meta_bytes(out_features, group_bytes)

    def forward(self, hidden: Tensor) -> Tensor:
        return packed_linear(hidden, self._weight, (self.codes, self.scales, self.zeros), self.bias)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._weight(dtype, self.codes, self.scales, self.zeros)

    def pack(self, rows: Tensor) -> dict[str, Tensor]:
        codes, scale, zero = quantise(rows, self.bits, self.group_size)
        return {"codes": codes, "scales": to_bytes(scale), "zeros": to_bytes(zero)}

    def unpack(self, packed: Mapping[str, Tensor]) -> Tensor:
        return self._weight(torch.float32, *(packed[name] for name in self.packed_names))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bits={self.bits}, group_size={self.group_size}"
        )

    def _weight(self, dtype: torch.dtype, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        return dequantise(codes, from_bytes(scales), from_bytes(zeros), self.bits, self.in_features, dtype)


def pack(
    model: nn.Module,
    *,
    leave: Collection[str] = (),
    bits: int = 4,
    group_size: int = 64,
    keep_dense: Sequence[str] = (),
) -> list[str]:
    """Replace the linear layers of a model, its output head excepted, by packed ones without values.

    Layers whose input features make no whole groups or bytes are left dense. Returns lines that say
    what was packed and what was left. Raises `ModelError` for settings or names that do not fit.
    """
    if bits not in PACKED_TOGETHER:
        raise ModelError(f"base.bits: {bits} is not supported; use one of 8, 4, 3, 2")
    if group_size < 1:
        raise ModelError(f"base.group_size: {group_size} is not a number of weights; use 64, for example")

    def make(
        in_features: int, out_features: int, bias: nn.Parameter | None, transposed: bool
    ) -> PackedLinear:
        return HqqLinear(in_features, out_features, bias, transposed, bits=bits, group_size=group_size)

    def why_not(in_features: int) -> str | None:
        if in_features % group_size:
            return f"{in_features} input features are no multiple of base.group_size {group_size}"
        if in_features % PACKED_TOGETHER[bits]:
            return f"{in_features} {bits}-bit codes a row do not fill whole bytes"
        return None

    return replace_linears(model, make, why_not, label="hqq", keep_dense=keep_dense, leave=leave)


def _meta_bytes(rows: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, width, dtype=torch.uint8, device="meta"), requires_grad=False)
