"""Numbers that are derived from the loss."""

from __future__ import annotations

import math

import pytest

from leantune.train.forward import perplexity


def test_perplexity_of_a_loss() -> None:
    """A loss beyond what exp can hold raised OverflowError in the middle of a run."""
    assert perplexity(0.0) == 1.0
    assert perplexity(math.log(50.0)) == pytest.approx(50.0)
    assert perplexity(1e9) == math.inf
    assert math.isnan(perplexity(math.nan))
