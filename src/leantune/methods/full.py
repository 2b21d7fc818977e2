"""Train every weight of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from torch import nn

from leantune.errors import ModelError
from leantune.methods.protocol import Attached


def attach(model: nn.Module, *, seed: int) -> Attached:
    """Make all parameters trainable. `seed` is not needed: nothing is new."""
    del seed
    model.requires_grad_(True)
    return _Full("full", model)


class _Full(Attached):
    def disabled(self) -> AbstractContextManager[None]:
        raise ModelError("full training changed the weights themselves; load the base model to compare")

    def describe(self) -> list[str]:
        return [f"all {sum(1 for _ in self._tensors())} weight tensors are trained"]

    def _tensors(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()  # tied weights count once
