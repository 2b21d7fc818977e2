"""A full copy of the model on each rank; gradients are summed once a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from leantune.strategies.placement import Placement
from leantune.strategies.process import World
from leantune.strategies.reduce import sum_over_ranks


def place(model: nn.Module, trainable: Mapping[str, nn.Parameter], world: World) -> Placement:
    """Leave everything whole on each device."""
    del model, trainable
    return _Replicated(world.device)


class _Replicated(Placement):
    def sum_over_ranks(self, tensors: Sequence[Tensor]) -> None:
        sum_over_ranks(tensors)
