"""Every rank holds some rows of each weight (FSDP2); a block's weights are gathered while it computes.

Frozen weights of the blocks are sharded as they are, packed ones too. Those outside (embeddings, head)
are needed from the first moment of a step to the last: gathered they would be whole all the time, and
twice for a moment, so they stay whole on every rank. So do tiny trained parameters (interventions, small
adapters), whose gradients are summed once a step.
What is gathered has the dtype that it is stored in, and autocast chooses that of the computation. Only
where weights of the model itself are trained in fp32 are they gathered in autocast's dtype: autocast would
keep its own copy of each from forward to backward, and so undo the sharding. Block scales are bytes, which
no policy casts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from leantune.errors import ModelError
from leantune.models.anatomy import decoder_blocks
from leantune.strategies.placement import ShardedPlacement
from leantune.strategies.process import World
from leantune.strategies.reduce import sum_over_ranks

# Trained parameters with less than this are kept whole on each rank: with gradients and two moments in
# fp32 they take at most four times as much there.
_REPLICATED_BYTES = 64 * 2**20


def place(
    model: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    world: World,
    *,
    sharding: str = "full",
    shard_devices: int | None = None,
    cpu_offload: bool = False,
    adapter: str = "auto",
    sync_every_micro_batch: bool = False,
    devices_per_node: int | None = None,
    gather_dtype: torch.dtype | None = None,
    new_parameters: frozenset[str] = frozenset(),
    pinned: frozenset[str] = frozenset(),
) -> ShardedPlacement:
    """Shard the model in place: its decoder blocks one by one, then what else of it is trained.

    `new_parameters` are those of an adapter, which `adapter` places but for the `pinned` ones, which are
    whole. `gather_dtype`: that of floating-point weights while gathered, if it is not
    their own; gradients are summed in fp32. Trained weights of the model itself are sharded like all of
    its weights. The wrapping needs no list of classes: blocks are what `decoder_blocks` finds.
    """
    _check_torch(model)
    _join_alone(world)
    mesh, groups = _mesh(world, sharding, shard_devices or devices_per_node or world.size)
    replicated, reason = _replicated(trainable, new_parameters, adapter, pinned)
    whole = {p for n, p in trainable.items() if n in replicated}
    whole |= {p for p in model.parameters() if p.ndim == 0}  # a scalar has no rows
    blocks = list(decoder_blocks(model).values())
    inside = {p for block in blocks for p in block.parameters()}
    whole |= {p for p in model.parameters() if p not in inside and not p.requires_grad}
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if cpu_offload else OffloadPolicy()
    cast = MixedPrecisionPolicy(gather_dtype, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": offload,
        "ignored_params": whole,
        "mp_policy": cast if gather_dtype else MixedPrecisionPolicy(),
    }
    reshard = sharding in ("full", "hybrid")
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    sharded = frozenset(trainable.keys() - replicated)
    root: Any = model
    if sharded and hasattr(root, "set_reduce_scatter_unused_params"):
        root.set_reduce_scatter_unused_params(True)  # experts that got no token on one rank
    return _Fsdp(
        root,
        world,
        mesh,
        sharded=sharded,
        cpu_offload=cpu_offload,
        sync_always=sync_every_micro_batch,
        keeps_gathered=not reshard,
        lines=[_describe(sharding, groups, world, cpu_offload), *reason],
    )


class _Fsdp(ShardedPlacement):
    def __init__(
        self,
        root: FSDPModule,
        world: World,
        mesh: DeviceMesh,
        *,
        sharded: frozenset[str],
        cpu_offload: bool,
        sync_always: bool,
        keeps_gathered: bool,
        lines: list[str],
    ) -> None:
        super().__init__(world.device, sharded)
        self._root = root
        self._world_size = world.size
        self._shards = mesh.get_group("shard")
        self._cpu_offload = cpu_offload
        self._sync_always = sync_always
        self._keeps_gathered = keeps_gathered
        self._lines = lines

    def describe(self) -> list[str]:
        return self._lines

    def parameters_device(self) -> torch.device:
        return torch.device("cpu") if self._cpu_offload else self.device

    def begin_pass(self, last: bool) -> None:
        if self.sharded and not self._sync_always:
            self._root.set_requires_gradient_sync(last)
        if self._keeps_gathered:  # through the whole step
            self._root.set_reshard_after_backward(last)

    def end_passes(self) -> None:
        root: Any = self._root
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def sum_over_ranks(self, tensors: Sequence[Tensor]) -> None:
        sum_over_ranks(tensors)

    def _summed(self, mean: Tensor) -> Tensor:
        return mean.mul_(self._world_size)  # FSDP2 leaves the mean over all ranks

    def _sum_over_shards(self, scalar: Tensor) -> None:
        dist.all_reduce(scalar, group=self._shards)


def _check_torch(model: nn.Module) -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < (2, 12) and any(not p.is_floating_point() for p in model.parameters()):
        raise ModelError(
            f"base: packed weights cannot be sharded by torch {torch.__version__}, whose FSDP2 wants "
            "gradients of every parameter it shards; use torch 2.12 or later, base: dense, or strategy: ddp"
        )


def _join_alone(world: World) -> None:
    """FSDP2 needs a process group, even of one."""
    if not dist.is_initialized():
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
            rank=0,
            world_size=1,
            timeout=timedelta(minutes=30),
        )


def _mesh(world: World, sharding: str, shard_devices: int) -> tuple[DeviceMesh, int]:
    """The devices as a line, or for hybrid as groups of `shard_devices`; and the number of groups."""
    kind = world.device.type
    if not sharding.startswith("hybrid"):
        return init_device_mesh(kind, (world.size,), mesh_dim_names=("shard",)), 1
    groups = world.size // shard_devices
    return init_device_mesh(kind, (groups, shard_devices), mesh_dim_names=("copy", "shard")), groups


def _replicated(
    trainable: Mapping[str, nn.Parameter], new: frozenset[str], adapter: str, pinned: frozenset[str]
) -> tuple[frozenset[str], list[str]]:
    """Names of the trained parameters that stay whole on every rank, and the line that says so."""
    lines = ["the method's own parameters are whole on every rank"] if pinned else []
    new -= pinned
    if not new:
        return pinned, lines
    size = sum(trainable[name].numel() * trainable[name].element_size() for name in new)
    keep = adapter == "replicated" or (adapter == "auto" and size < _REPLICATED_BYTES)
    asked = (
        "as asked"
        if adapter != "auto"
        else f"{'less' if keep else 'more'} than {_REPLICATED_BYTES >> 20} MiB"
    )
    where = "whole on every rank, one all-reduce a step" if keep else "sharded like the weights"
    lines.append(f"adapter of {size / 2**20:.1f} MiB: {where} ({asked})")
    return pinned | new if keep else pinned, lines


def _describe(sharding: str, groups: int, world: World, cpu_offload: bool) -> str:
    kept = "kept gathered through a step" if "grad_op" in sharding else "gathered for each block"
    copies = f", {groups} copies" if groups > 1 else ""
    host = "; the shards and their optimizer states in host memory" if cpu_offload else ""
    return f"weights sharded over {world.size // groups} devices{copies}, {kept}{host}"
