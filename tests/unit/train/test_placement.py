"""The gradients of a step between the strategy and the method."""

from __future__ import annotations

import torch
from torch import nn

from leantune.strategies.placement import Placement


def placed(*gradients: list[float] | None) -> Placement:
    """Parameters with these gradients; None is a parameter that no record has touched."""
    parameters = {str(n): nn.Parameter(torch.zeros(2)) for n in range(len(gradients))}
    for parameter, gradient in zip(parameters.values(), gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    placement = Placement(torch.device("cpu"))
    placement.take(parameters)
    return placement


def test_the_norm_is_that_of_the_gradients_as_the_optimizer_will_see_them() -> None:
    """LoReFT replaces the gradient of its factor by its tangent part; clipping went by the old one."""
    placement = placed([3.0, 0.0], [0.0, 4.0])
    placement.sum_gradients(torch.zeros(1))
    assert float(placement.total_norm()) == 5.0
    placement.trained["0"].grad = torch.zeros(2)
    assert float(placement.total_norm()) == 4.0


def test_a_parameter_without_a_gradient_has_one_of_zero() -> None:
    """The ranks sum the same tensors, whatever their records touched."""
    placement = placed(None, [0.0, 4.0])
    gradients = placement.sum_gradients(torch.zeros(1))
    assert [g.tolist() for g in gradients] == [[0.0, 0.0], [0.0, 4.0]]
    assert placement.trained["0"].grad is gradients[0]
