"""Drawing the next token of one row."""

from __future__ import annotations

import torch
from torch import Tensor

from leantune.generate.sampling import Sampling


def draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """A token id drawn as `sampling` says (temperature, then top_k, then top_p); logits: fp32 [V]."""
    scores = (logits_V - logits_V.max()) / sampling.temperature  # the least temperature overflows nothing
    if 0 < sampling.top_k < len(scores):
        least = scores.topk(sampling.top_k).values[-1]
        scores = scores.masked_fill(scores < least, float("-inf"))
    probabilities = scores.softmax(-1)
    if sampling.top_p < 1:
        probabilities = _likeliest(probabilities, sampling.top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _likeliest(probabilities_V: Tensor, top_p: float) -> Tensor:
    """Zero outside the smallest set of likeliest tokens that sum to `top_p` (arXiv 1904.09751)."""
    ordered, index = probabilities_V.sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(probabilities_V).scatter(0, index, ordered.masked_fill(before >= top_p, 0.0))
