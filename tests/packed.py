"""The smallest packed base there can be, for tests of what is above: rows of codes with one scale each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from leantune.bases.packing import replace_linears
from leantune.models.anatomy import linears
from leantune.models.packed import PackedLinear


class TinyPacked(PackedLinear):
    """A weight [out, in] as codes, uint8 [out, in], and scales, float32 [out, 1]."""

    packed_names = ("codes", "scales")

    def __init__(
        self, in_features: int, out_features: int, bias: nn.Parameter | None, transposed: bool
    ) -> None:
        super().__init__(in_features, out_features, bias, transposed)
        shapes = {"codes": (out_features, in_features), "scales": (out_features, 1)}
        for name, dtype in {"codes": torch.uint8, "scales": torch.float32}.items():
            memory = torch.empty(shapes[name], dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(memory, requires_grad=False))

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.dequantise(hidden.dtype), self.bias)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.unpack({name: getattr(self, name) for name in self.packed_names}).to(dtype)

    def pack(self, rows: Tensor) -> dict[str, Tensor]:
        scales = rows.abs().amax(dim=1, keepdim=True) / 7.0
        codes = (rows / scales.clamp_min(1e-30)).round() + 128.0
        return {"codes": codes.to(torch.uint8), "scales": scales}

    def unpack(self, packed: Any) -> Tensor:
        return (packed["codes"].float() - 128.0) * packed["scales"]


def fill_tiny(layer: PackedLinear, rows: Tensor) -> None:
    """Give a packed layer the values of a weight, float32 [out, in]."""
    for name, value in layer.pack(rows).items():
        setattr(layer, name, nn.Parameter(value, requires_grad=False))


def pack_tiny(model: Any) -> Any:
    """Replace a real model's linear layers by packed ones that hold their (coarser) weights."""
    weights = {name: _rows(layer) for name, layer in linears(model).items()}
    replace_linears(model, TinyPacked, lambda _: None, label="tiny")
    for name, layer in linears(model).items():
        assert isinstance(layer, PackedLinear)
        fill_tiny(layer, weights[name])
    return model


def _rows(layer: Any) -> Tensor:
    weight = layer.weight.detach()
    return weight if isinstance(layer, nn.Linear) else weight.t()
