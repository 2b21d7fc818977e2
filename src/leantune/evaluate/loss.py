"""Numbers derived from a mean token loss."""

from __future__ import annotations

import math


def perplexity(mean_loss: float) -> float:
    """exp of the mean loss per token (nats); infinite where that overflows."""
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf
