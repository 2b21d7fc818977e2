"""The dtypes behind each value of `train.precision`; `config/precision.py` explains them in words."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """Dtypes of a run. `compute`: autocast's, or None; `scaled`: losses are scaled against underflow."""

    weights: torch.dtype
    trained: torch.dtype
    buffers: torch.dtype
    compute: torch.dtype | None = None
    scaled: bool = False

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context of a forward pass."""
        return nullcontext() if self.compute is None else torch.autocast(device.type, self.compute)


_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
# Buffers that a model makes in fp32 on purpose, rotary tables above all, stay so in every row.
PRECISIONS = {
    "fp32": Precision(_FP32, _FP32, _FP32),
    "bf16": Precision(_BF16, _BF16, _BF16),
    "bf16_mixed": Precision(_BF16, _FP32, _BF16, compute=_BF16),
    "bf16_fp32_buffers": Precision(_BF16, _BF16, _FP32, compute=_BF16),
    "fp16_mixed": Precision(_FP16, _FP32, _FP16, compute=_FP16, scaled=True),
}


def choose_precision(name: str, device: torch.device) -> Precision:
    """The precision of this name; `auto` is fp32 on a CPU, bf16_mixed or else fp16_mixed on a GPU."""
    if name == "auto":
        if device.type != "cuda":
            name = "fp32"
        else:
            name = "bf16_mixed" if torch.cuda.is_bf16_supported() else "fp16_mixed"
    return PRECISIONS[name]
