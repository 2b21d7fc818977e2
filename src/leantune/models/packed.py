"""A linear layer whose frozen weight is kept packed, and what loading needs to know of it.

A base (nf4, hqq) subclasses `PackedLinear`. Everything packed is stored by rows of the weight
[out, in]: the first dimension of each packed tensor is `out`, so a shard of it is whole rows
of the matrix, and rows can be packed one slice at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W [out, in] packed. `transposed`: the checkpoint holds [in, out], as GPT-2's does.

    Subclasses register their packed tensors as frozen parameters with `out` rows, named in
    `packed_names`, on the meta device; loading gives them memory and values.
    """

    packed_names: tuple[str, ...] = ()
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: nn.Parameter | None, transposed: bool
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.transposed = transposed
        self.register_parameter("bias", bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of `hidden`, or autocast's."""
        raise NotImplementedError

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that the layer computes with, [out, in]."""
        raise NotImplementedError

    def pack(self, rows: Tensor) -> dict[str, Tensor]:
        """Some rows of the weight, float32 [n, in], packed: a tensor [n, ...] for each of `packed_names`.

        A row is packed the same whatever other rows come with it. A tensor may be preliminary
        if its name is in what `finish` returns.
        """
        raise NotImplementedError

    def unpack(self, packed: Mapping[str, Tensor]) -> Tensor:
        """The way back from `pack`: the float32 rows [n, in] that the layer will compute with."""
        raise NotImplementedError

    def unfinished(self) -> tuple[str, ...]:
        """Names of packed tensors that are computed from the whole matrix, once all rows are packed."""
        return ()

    def finish(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Final values of the `unfinished` tensors and of buffers, from those of `pack` for all rows."""
        raise NotImplementedError

    def refined(self, finished: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What `unpack` takes for the `unfinished` tensors of all rows, from the values of `finish`."""
        raise NotImplementedError

    def to_dense(self) -> nn.Module:
        """An ordinary layer of the kind that was packed, with the weight that this one computes with."""
        weight = self.dequantise()
        with torch.device("meta"):
            dense = (
                Conv1D(self.out_features, self.in_features)
                if self.transposed
                else nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
            )
        stored = weight.t().contiguous() if self.transposed else weight
        dense.weight = nn.Parameter(stored, requires_grad=False)
        if self.bias is not None:
            dense.bias = self.bias
        return dense
