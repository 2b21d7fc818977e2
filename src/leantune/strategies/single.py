"""One process: there is nobody to talk to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def sum_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Leave the tensors as they are: this rank is all ranks."""
    del tensors
