"""Token cross-entropy, summed, in the memory of the logits it is given.

Legend: N labelled positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_ROWS = 64  # rows worked on at a time: the temporary stays in cache and below 64 x V x 4 bytes


class _SummedCrossEntropy(torch.autograd.Function):
    """Turns the logits into their gradient where they lie, so that no second N x V tensor exists."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, with_gradient: bool) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=logits_NV.device)
        for start in range(0, len(labels_N), _CHUNK_ROWS):
            rows = logits_NV[start : start + _CHUNK_ROWS]
            labels = labels_N[start : start + _CHUNK_ROWS].unsqueeze(1)
            scores = rows.float()
            log_norm = scores.logsumexp(dim=1, keepdim=True)
            total += (log_norm - scores.gather(1, labels)).sum()
            if with_gradient:  # for fp32 logits `scores` is `rows` itself
                scores.sub_(log_norm).exp_()
                scores.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=scores.dtype))
                if scores.dtype != rows.dtype:
                    rows.copy_(scores)
        if with_gradient:  # saved, not kept: a checkpoint around this lets go of it until backward
            ctx.save_for_backward(logits_NV)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grad_outputs[0]), None, None


def summed_cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Sum over positions of -log softmax(logits)[label], in fp32 (a scalar).

    logits_NV: float [N, V]; labels_N: int64 [N]. Where a gradient is needed, the logits are
    overwritten with it: do not read them afterwards (an operation that saved them for its
    own backward makes autograd raise). Backward may run once.
    """
    with_gradient = torch.is_grad_enabled() and logits_NV.requires_grad
    return _SummedCrossEntropy.apply(logits_NV, labels_N, with_gradient)  # pyright: ignore[reportReturnType]
