"""Where the trained parameters of a run lie, and what the ranks do with their gradients.

A strategy is one file of this folder with `place(model, trainable, world, **settings) -> Placement`.
It gets the model while its weights are still on the meta device, and may shard it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from leantune.models.shards import gather_rows, local_rows


class Placement:
    """All parameters whole on this rank, which is the only one; other strategies change what differs.

    The optimizer works on `trained`: for a sharded parameter that is this rank's rows as an
    ordinary tensor in the same memory, so optimizers, clipping and offload know nothing of shards.
    """

    # Whether every rank must run as many forward and backward passes as the others.
    equal_passes = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.whole_parameters: dict[str, nn.Parameter] = {}
        self.trained: dict[str, nn.Parameter] = {}

    def describe(self) -> list[str]:
        """Lines for the user: what is where."""
        return []

    def parameters_device(self) -> torch.device:
        """Where the weights are kept."""
        return self.device

    def take(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take the trained parameters, once they have memory and values."""
        self.whole_parameters = dict(parameters)
        self.trained = dict(parameters)

    def replicated(self) -> list[nn.Parameter]:
        """The trained parameters that every rank holds whole, and that must be equal on all of them."""
        return list(self.trained.values())

    def begin_pass(self, last: bool) -> None:
        """Called before each forward and backward pass of a step; `last`: its gradients complete the step."""
        del last

    def end_passes(self) -> None:
        """Called after forward passes without backward: nothing that they gathered may outlive them."""

    def sum_over_ranks(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, in place."""
        del tensors

    def sum_gradients(self, extra: Tensor) -> list[Tensor]:
        """Sum the gradients and `extra` over all ranks; returns the gradients of `trained`, in its order.

        A parameter that no record has touched gets a gradient of zero.
        """
        gradients = [_gradient(parameter) for parameter in self.trained.values()]
        self.sum_over_ranks([*gradients, extra])
        return gradients

    def total_norm(self) -> Tensor:
        """The norm of all gradients together, a scalar on the compute device; a collective."""
        return self._norms([_gradient(p) for p in self.trained.values()]).square().sum().sqrt()

    def whole(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor of a parameter, or of an optimizer state of its shape; a collective."""
        del name
        return local

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, which is a parameter or an optimizer state of its shape."""
        del name
        return whole

    def _norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """The norm of each tensor, on the compute device: one transfer for each device they lie on."""
        norms: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            norm = torch.norm(tensor, dtype=torch.float32)  # pyright: ignore
            norms.setdefault(tensor.device, []).append(cast("Tensor", norm))
        groups = list(norms.values())
        parts = [torch.stack(group).to(self.device) for group in groups]
        return torch.cat(parts) if parts else torch.zeros(0, device=self.device)


class ShardedPlacement(Placement):
    """Some of the parameters are DTensors, sharded by rows; the others are whole on every rank."""

    equal_passes = True

    def __init__(self, device: torch.device, sharded: frozenset[str]) -> None:
        super().__init__(device)
        self.sharded = sharded
        self._fresh = True

    def take(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.whole_parameters = dict(parameters)
        self.trained = {
            name: nn.Parameter(local_rows(p).local) if name in self.sharded else p
            for name, p in parameters.items()
        }

    def replicated(self) -> list[nn.Parameter]:
        return [p for name, p in self.trained.items() if name not in self.sharded]

    def sum_gradients(self, extra: Tensor) -> list[Tensor]:
        for name in self.sharded:
            parameter, view = self.whole_parameters[name], self.trained[name]
            if self._fresh:  # FSDP2 pads or pins the memory of a shard when it first runs
                view.data = local_rows(parameter).local
            view.grad = None if parameter.grad is None else self._summed(local_rows(parameter.grad).local)
            parameter.grad = None
        self._fresh = False
        gradients = [_gradient(parameter) for parameter in self.trained.values()]
        replicated = [g for name, g in zip(self.trained, gradients, strict=True) if name not in self.sharded]
        self.sum_over_ranks([*replicated, extra])
        return gradients

    def total_norm(self) -> Tensor:
        mine = [_gradient(p) for name, p in self.trained.items() if name in self.sharded]
        shared = [_gradient(p) for name, p in self.trained.items() if name not in self.sharded]
        squares = self._norms(mine).square().sum()
        self._sum_over_shards(squares)
        return (squares + self._norms(shared).square().sum()).sqrt()

    def whole(self, name: str, local: Tensor) -> Tensor:
        if name not in self.sharded or local.ndim == 0:
            return local
        return gather_rows(self.whole_parameters[name], local)

    def part(self, name: str, whole: Tensor) -> Tensor:
        if name not in self.sharded or whole.ndim == 0:
            return whole
        rows = local_rows(self.whole_parameters[name])
        return whole[rows.start : rows.stop]

    def _summed(self, mean: Tensor) -> Tensor:
        """The sum over ranks, from what FSDP2 leaves."""
        raise NotImplementedError

    def _sum_over_shards(self, scalar: Tensor) -> None:
        raise NotImplementedError


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
