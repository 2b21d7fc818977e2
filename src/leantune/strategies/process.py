"""One process of a run: joining the others, and the few things the ranks tell each other.

Works in whatever started the process: `launch` (the ranks meet in a file), `torchrun` (at
MASTER_ADDR and MASTER_PORT), or a plain shell, where the world is one process without a group
and every function here is a no-op.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from leantune.errors import LaunchError
from leantune.strategies.failure import die_with_parent, in_worker, is_peer_lost
from leantune.strategies.launch import STORE_FILE

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The place of this process among all of them; local_rank counts within the machine."""

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank that writes files and talks to the user."""
        return self.rank == 0


def join(device_kind: Literal["cpu", "cuda"], timeout_seconds: float) -> World:
    """Join the other ranks and take a device; timeout_seconds bounds every wait for another rank.

    Raises LaunchError if the environment is incomplete, a CUDA device is missing, or the ranks do
    not meet.
    """
    if not in_worker():
        return World(0, 0, 1, _device(device_kind, 0))
    die_with_parent()
    rank, size, local_rank = _env_int("RANK"), _env_int("WORLD_SIZE"), _env_int("LOCAL_RANK")
    device = _device(device_kind, local_rank)
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        _use_loopback()
    store = os.environ.get(STORE_FILE)
    meeting_point = f"file://{store}" if store else "env://"
    try:
        dist.init_process_group(
            backend="nccl" if device_kind == "cuda" else "gloo",
            init_method=meeting_point,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device_kind == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise _join_error(error, store) from error
    return World(rank, local_rank, size, device)


def place_on_node() -> tuple[int, int]:
    """Where a worker is: the rank of the first worker on its machine, and its own number there."""
    rank, local_rank = _env_int("RANK"), _env_int("LOCAL_RANK")
    return rank - local_rank, local_rank


def leave() -> None:
    """Say goodbye once all ranks are done (rank 0 may still be saving); not to be called after an error."""
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()


def gather_objects(value: T) -> list[T]:
    """The values of all ranks in the order of ranks, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait until every rank is here."""
    if dist.is_initialized():
        dist.barrier()


def _device(kind: Literal["cpu", "cuda"], local_rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        raise LaunchError(
            f"process {local_rank} of this machine needs a CUDA device of its own, but torch sees {visible}; "
            "lower strategy.devices, widen CUDA_VISIBLE_DEVICES, or set train.device: cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _env_int(name: str) -> int:
    value = os.environ.get(name)
    if value is None or not value.isdecimal():
        raise LaunchError(
            f"environment variable {name} is {value!r}, but a worker needs a whole number there; "
            "start it with leantune or torchrun, or unset RANK and WORLD_SIZE to run one process"
        )
    return int(value)


def _use_loopback() -> None:
    """Ranks of one machine talk over its loopback: gloo would look up the host's name, which may fail."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _join_error(error: Exception, store: str | None) -> Exception:
    if isinstance(error, RuntimeError) and not isinstance(error, dist.DistError) and is_peer_lost(error):
        return error
    place = "one machine"
    if store is None:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return LaunchError(
        f"the processes did not meet on {place} ({reason}); check that all of them were started with the "
        "same number of devices and nodes, and that rank 0 can listen there and the others can reach it"
    )
