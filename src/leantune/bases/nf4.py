"""NF4: frozen weights in 4 bits, with a scale for each 64 values of a row (QLoRA, arXiv 2305.14314)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from leantune.bases.packing import replace_linears
from leantune.models.packed import PackedLinear
from leantune.ops.nf4 import (
    BLOCK,
    NESTED_BLOCK,
    dequantise,
    dequantise_scales,
    quantise,
    quantise_scales,
)
from leantune.ops.packed import from_bytes, packed_linear, to_bytes


class Nf4Linear(PackedLinear):
    """A linear layer on NF4 codes.

    `codes`: uint8 [out, in/2]. `scales`: the bytes of float32 [out, in/64], or with `double_quant` 8-bit
    codes, uint8 [out, in/64]; those have scales of their own and an offset in the buffers `nested_scales`
    and `scale_offset` (bytes of float32 [ceil(out * in/64 / 256)] and [1]). They belong to the
    whole matrix, so every rank holds them whole. Everything float32 is stored as bytes, which no
    `model.to(dtype)` and no mixed-precision policy can cast.
    """

    packed_names = ("codes", "scales")
    bias: nn.Parameter | None
    codes: Tensor
    scales: Tensor
    nested_scales: Tensor
    scale_offset: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: nn.Parameter | None,
        transposed: bool,
        double_quant: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, transposed)
        self.double_quant = double_quant
        num_blocks = in_features // BLOCK
        self.codes = _frozen(out_features, in_features // 2)
        self.scales = _frozen(out_features, num_blocks if double_quant else 4 * num_blocks)
        if double_quant:
            num_nested = -(-out_features * num_blocks // NESTED_BLOCK)
            self.register_buffer("nested_scales", _zero_bytes(4 * num_nested))
            self.register_buffer("scale_offset", _zero_bytes(4))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., in] -> [..., out]; neither pass keeps the unpacked weight."""
        if self.double_quant:
            packed = (self.codes, self.scales, self.nested_scales, self.scale_offset)
            return packed_linear(hidden, _nested_weight, packed, self.bias)
        return packed_linear(hidden, _weight, (self.codes, self.scales), self.bias)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in]; each value is computed in float32 and rounded once."""
        if self.double_quant:
            return _nested_weight(dtype, self.codes, self.scales, self.nested_scales, self.scale_offset)
        return _weight(dtype, self.codes, self.scales)

    def pack(self, rows: Tensor) -> dict[str, Tensor]:
        """Codes and scales of some rows; with `double_quant` the scales are preliminary, float32 [n, in/64].

        Raises `ModelError` if a value is not finite.
        """
        codes, scales = quantise(rows)
        return {"codes": codes, "scales": scales if self.double_quant else to_bytes(scales)}

    def unpack(self, packed: Mapping[str, Tensor]) -> Tensor:
        """The float32 rows [n, in] of what `pack` gave; float32 scales are taken as they are.

        Preliminary scales give the weight before its scales are quantised in turn, which moves it by
        about half a percent. Finished 8-bit scales can be unpacked for the whole matrix only.
        """
        codes, scales = packed["codes"], packed["scales"]
        if scales.dtype == torch.float32:
            return dequantise(codes, scales)
        if not self.double_quant:
            return _weight(torch.float32, codes, scales)
        if len(codes) != self.out_features:
            raise ValueError(f"8-bit scales of {len(codes)} rows, expected all {self.out_features}")
        return _nested_weight(torch.float32, codes, scales, self.nested_scales, self.scale_offset)

    def unfinished(self) -> tuple[str, ...]:
        """With `double_quant`, the scales: their 8-bit codes depend on the mean of all of them."""
        return ("scales",) if self.double_quant else ()

    def finish(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """8-bit scales and the two buffers, from the float32 scales of all rows."""
        codes, nested, offset = quantise_scales(whole["scales"])
        return {"scales": codes, "nested_scales": to_bytes(nested), "scale_offset": to_bytes(offset)}

    def refined(self, finished: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The float32 scales [out, in/64] that the 8-bit ones stand for."""
        nested, offset = from_bytes(finished["nested_scales"]), from_bytes(finished["scale_offset"])
        return {"scales": dequantise_scales(finished["scales"], nested, offset)}

    def extra_repr(self) -> str:
        """What `print(model)` says of the layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, double_quant={self.double_quant}"
        )


def pack(
    model: nn.Module,
    *,
    leave: Collection[str] = (),
    double_quant: bool = False,
    keep_dense: Sequence[str] = (),
) -> list[str]:
    """Replace the linear layers of a model without weights by NF4 ones; returns lines for the user.

    The output head, layers in modules that `leave` prefixes, those that `keep_dense` names, and
    those whose inputs are no multiple of 64 stay dense. Raises `ModelError` if nothing can be packed.
    """

    def make(in_features: int, out_features: int, bias: nn.Parameter | None, transposed: bool) -> Nf4Linear:
        return Nf4Linear(in_features, out_features, bias, transposed, double_quant)

    return replace_linears(model, make, _why_not, label="nf4", keep_dense=keep_dense, leave=leave)


def _why_not(in_features: int) -> str | None:
    if in_features % BLOCK == 0:
        return None
    return f"{in_features} inputs are not a multiple of the block of {BLOCK}"


def _frozen(rows: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, width, dtype=torch.uint8, device="meta"), requires_grad=False)


def _zero_bytes(count: int) -> Tensor:
    # Real ones even where a model is being made on the meta device: buffers are never given memory later.
    return torch.zeros(count, dtype=torch.uint8, device="cpu")


def _weight(dtype: torch.dtype, codes: Tensor, scales: Tensor) -> Tensor:
    return dequantise(codes, from_bytes(scales), dtype)


def _nested_weight(
    dtype: torch.dtype, codes: Tensor, scales: Tensor, nested: Tensor, offset: Tensor
) -> Tensor:
    whole = dequantise_scales(scales, from_bytes(nested), from_bytes(offset))
    return dequantise(codes, whole, dtype)
