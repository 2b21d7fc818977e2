"""The worker program of test_launch.py: `launch_worker.py MODE FOLDER`; imports torch only where needed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from leantune.errors import DataError
from leantune.strategies.failure import worker_errors
from leantune.strategies.stop import StopRequest

RANK = int(os.environ.get("RANK", "0"))


def write(folder: Path, name: str, value: object) -> None:
    partial = folder / f".{name}-{RANK}"
    partial.write_text(json.dumps(value))
    partial.replace(folder / f"{name}-{RANK}")


def wait_for(path: Path) -> str:
    while not path.exists():
        time.sleep(0.02)
    return path.read_text()


def talk(folder: Path) -> None:
    """Every collective, with answers that differ from what a single rank would give."""
    import torch

    from leantune.strategies import process
    from leantune.strategies.ddp import sum_over_ranks

    world = process.join("cpu", 60)
    total = torch.tensor([1.0 + world.rank])
    sum_over_ranks([total])
    answers = {
        "sum": total.tolist(),
        "objects": process.gather_objects({"from": world.rank}),
        "main": world.is_main,
        "world": [world.rank, world.local_rank, world.size],
    }
    process.barrier()
    process.leave()
    write(folder, "answers", answers)


def fail_in_collective(folder: Path) -> None:
    """Rank 0 holds a stop request and waits in a sum for rank 1, which fails."""
    import torch

    from leantune.strategies import process
    from leantune.strategies.ddp import sum_over_ranks

    process.join("cpu", 600)
    with StopRequest():
        if RANK == 0:
            write(folder, "pid", os.getpid())
        if RANK == 1:
            other = int(wait_for(folder / "pid-0"))
            time.sleep(0.3)
            os.kill(other, signal.SIGTERM)
            raise DataError("records.jsonl, line 3: no field 'output'")
        sum_over_ranks([torch.ones(1)])
        write(folder, "survived", True)


def fail_beside_blocked(folder: Path) -> None:
    """Rank 0 cannot be ended by SIGTERM, like a process in a C call that never returns."""
    if RANK == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write(folder, "pid", os.getpid())
        time.sleep(120)
    wait_for(folder / "pid-0")
    raise DataError("a bad record")


def peer_lost_first(folder: Path) -> None:
    """Rank 0 sees the broken connection and is noticed before the rank whose fault it is."""
    if RANK == 0:
        raise RuntimeError("[pair.cc:538] Connection closed by peer [127.0.0.1]:4242")
    time.sleep(0.5)
    raise KeyError("input_ids")


def exit_silently(folder: Path) -> None:
    if RANK == 1:
        os._exit(3)
    time.sleep(0.3)


def segfault(folder: Path) -> None:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(120)


def show_env(folder: Path) -> None:
    write(folder, "env", dict(os.environ))


def train_until_stopped(folder: Path) -> None:
    """A step outlasts the signal; the 'checkpoint' is written after it."""
    with StopRequest() as stop:
        write(folder, "pid", os.getpid())
        while not stop.requested:
            time.sleep(0.02)
        time.sleep(1.0)
        write(folder, "checkpoint", stop.requested)


def hang(folder: Path) -> None:
    with StopRequest():
        write(folder, "pid", os.getpid())
        time.sleep(120)


if __name__ == "__main__":
    with worker_errors():
        globals()[sys.argv[1]](Path(sys.argv[2]))
