"""A parameter that may be sharded by rows over several ranks (a DTensor of FSDP2), and its local part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


class Rows(NamedTuple):
    """This rank's rows of a tensor, `start` to `stop`; `local` is the parameter's own memory."""

    local: Tensor
    start: int
    stop: int


def local_rows(tensor: Tensor) -> Rows:
    """The rows that this rank holds: all of them for an ordinary tensor (a scalar counts as one row)."""
    if not isinstance(tensor, DTensor):
        return Rows(tensor.detach(), 0, tensor.shape[0] if tensor.ndim else 1)
    local = tensor.to_local().detach()
    start, num_rows = 0, tensor.shape[0]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            chunk = -(-num_rows // tensor.device_mesh.size(axis))  # as torch.chunk cuts
            start = min(chunk * tensor.device_mesh.get_local_rank(axis), num_rows)
    return Rows(local, start, start + local.shape[0])


def gather_rows(like: Tensor, local: Tensor) -> Tensor:
    """The whole [rows, ...] tensor of which every rank gives its rows, cut as `like` is; a collective.

    `local` may have other trailing dimensions and another dtype than `like`. The result is on the
    device that the ranks communicate on.
    """
    if not isinstance(like, DTensor):
        return local
    device = like.device_mesh.device_type
    local = local.to(torch.device(device, torch.cuda.current_device()) if device == "cuda" else device)
    shape = torch.Size((like.shape[0], *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    spread = DTensor.from_local(
        local.contiguous(), like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    return spread.full_tensor()
