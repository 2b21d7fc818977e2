"""Sums over all ranks, in flat buckets.

Gradients are packed into flat buckets and reduced after the last micro-batch, instead of
hooking backward: ranks may then have different numbers of micro-batches (even none), a
parameter may be unused on one rank, and one step is one synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET_BYTES = 64 * 2**20


def sum_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all ranks, in place; every rank passes the same shapes.

    One bucket travels while the next is packed. Without a process group (ddp on one device)
    this rank is all ranks.
    """
    if not dist.is_initialized():
        return
    on_the_way: tuple[list[Tensor], Tensor, dist.Work | None] | None = None
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        sent = (bucket, flat, dist.all_reduce(flat, async_op=True))
        if on_the_way is not None:
            _unpack(*on_the_way)
        on_the_way = sent
    if on_the_way is not None:
        _unpack(*on_the_way)


def _unpack(bucket: list[Tensor], flat: Tensor, work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
    offset = 0
    for tensor in bucket:
        tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
        offset += tensor.numel()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and (size + nbytes > _BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += nbytes
    if bucket:
        yield bucket
