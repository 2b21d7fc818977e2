"""One process: there is nobody to talk to."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from leantune.strategies.placement import Placement
from leantune.strategies.process import World


def place(model: nn.Module, trainable: Mapping[str, nn.Parameter], world: World) -> Placement:
    """Leave everything whole on the device."""
    del model, trainable
    return Placement(world.device)
