"""Starting the worker processes of one machine and watching over them; imports no torch.

Each worker gets the environment of a `torchrun` worker (RANK, WORLD_SIZE, LOCAL_RANK, ...). Ranks of one
machine meet in a file of a private folder, so that there is no port to choose or to clash over; ranks
of several machines meet at the endpoint given by the user, where rank 0 listens.

Torch's elastic launcher is not used: after a failure it leaves a worker that is blocked in a
collective alive for a fixed 30 s, a second Ctrl-C only starts its waiting anew, and it wraps the error
of the worker in a report of its own. What it adds, restarts and changing numbers of machines, is not
needed here. Workers still run under `torchrun` where somebody prefers it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from leantune.errors import LaunchError
from leantune.strategies.failure import PARENT_PID, REPORT_DIR, Failure, read_failures
from leantune.strategies.stop import StopRequest

STORE_FILE = "LEANTUNE_STORE_FILE"

_POLL_SECONDS = 0.05
# Long enough for peers to notice and report, short enough to end a blocked collective within 5 s.
_GRACE_SECONDS = 3.0
_REAP_SECONDS = 5.0
# What a worker exits with that was told to stop, itself or through another rank, and has saved its work.
_POLITE_CODES = {128 + signal.SIGTERM, 128 + signal.SIGINT}
_STOPPED_CODES = {-signal.SIGTERM, *_POLITE_CODES}


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    ended_time: float | None = None
    killed: bool = False

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None and self.ended_time is None:
            # It ended at some moment since the last look.
            self.ended_time = time.time() - _POLL_SECONDS
        return code

    def kill(self) -> None:
        if self.poll() is None:
            self.killed = True
            self.process.kill()


def launch(
    args: Sequence[str],
    *,
    devices_per_node: int,
    nodes: int = 1,
    node_rank: int = 0,
    rdzv_endpoint: str | None = None,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] | None = None,
    on_poll: Callable[[], None] | None = None,
) -> None:
    """Run `command + args` (default command: `python -m leantune`) once per device and wait for the end.

    With several nodes, call it on each of them with its own node_rank and the same rdzv_endpoint
    (`host:port`, a free port of node 0). `env` is added to the environment of the workers. `on_poll` is
    called many times a second while they work, and once after their end.

    The first SIGINT or SIGTERM is passed on as SIGTERM; the workers then finish in their own time, and
    SystemExit(130) or (143) is raised. A second SIGINT kills them at once. Raises LaunchError if a
    worker fails: it begins with the rank that failed first and its message; the others are ended within
    seconds.
    """
    check_launch(devices_per_node, nodes, node_rank, rdzv_endpoint)
    program = [*(command or (sys.executable, "-m", "leantune")), *args]
    with tempfile.TemporaryDirectory(prefix="leantune-", ignore_cleanup_errors=True) as folder:
        shared = _environment(Path(folder), devices_per_node, nodes, rdzv_endpoint, env or {})
        workers: list[_Worker] = []
        with StopRequest(announce=False) as stop:
            try:
                for local_rank in range(devices_per_node):
                    rank = node_rank * devices_per_node + local_rank
                    workers.append(_start(program, shared, rank, local_rank))
                _watch(workers, stop, on_poll or (lambda: None))
            except KeyboardInterrupt:
                raise SystemExit(128 + signal.SIGINT) from None
            finally:
                _end(workers)
        failure = _first_failure(workers, Path(folder), stop.requested)
    if failure and (failure.own or not stop.requested):
        raise LaunchError(f"rank {failure.rank}: {failure.message}{failure.details}")
    if stop.signal is not None:
        raise SystemExit(128 + stop.signal)
    polite = [code for code in (worker.process.returncode for worker in workers) if code in _POLITE_CODES]
    if polite:  # stopped through another machine, or by a signal to a worker
        raise SystemExit(polite[0])


def check_launch(devices_per_node: int, nodes: int, node_rank: int, rdzv_endpoint: str | None) -> None:
    """Raise `LaunchError` if `launch` would refuse these numbers."""
    if devices_per_node < 1 or nodes < 1:
        raise LaunchError(f"{devices_per_node} devices on each of {nodes} nodes: both must be at least 1")
    if not 0 <= node_rank < nodes:
        raise LaunchError(f"node rank {node_rank} is not one of 0 to {nodes - 1}, for {nodes} nodes")
    if rdzv_endpoint is None:
        if nodes > 1:
            raise LaunchError(
                f"{nodes} nodes need an endpoint at which they meet: host:port, a free port of node 0"
            )
        return
    if nodes == 1:
        raise LaunchError(f"rendezvous endpoint {rdzv_endpoint!r}: one node has nobody to meet; set --nnodes")
    host, _, port = rdzv_endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(
            f"rendezvous endpoint {rdzv_endpoint!r} is not of the form host:port, e.g. node0:29500"
        )


def _environment(
    folder: Path, devices_per_node: int, nodes: int, rdzv_endpoint: str | None, extra: Mapping[str, str]
) -> dict[str, str]:
    """The variables that all workers share."""
    shared = {**os.environ, **extra}
    # Without it every worker would use all the cores, and they would get in each other's way.
    shared.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // devices_per_node)))
    shared["WORLD_SIZE"] = str(nodes * devices_per_node)
    shared["LOCAL_WORLD_SIZE"] = str(devices_per_node)
    shared[PARENT_PID] = str(os.getpid())
    shared[REPORT_DIR] = str(folder)
    if rdzv_endpoint is None:
        shared[STORE_FILE] = str(folder / "store")
    else:
        host, _, port = rdzv_endpoint.rpartition(":")
        shared["MASTER_ADDR"], shared["MASTER_PORT"] = host.strip("[]"), port
        shared.pop(STORE_FILE, None)
    return shared


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start(program: Sequence[str], shared: Mapping[str, str], rank: int, local_rank: int) -> _Worker:
    try:
        process = subprocess.Popen(
            program,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(local_rank)},
            stdin=subprocess.DEVNULL,
            # Ctrl-C then reaches the parent alone, which passes it on exactly once.
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"rank {rank}: cannot start {program[0]!r}: {error.strerror or error}") from error
    return _Worker(rank, process)


def _watch(workers: Sequence[_Worker], stop: StopRequest, on_poll: Callable[[], None]) -> None:
    """Return when all workers have ended, or some time after one has failed."""
    passed_on = False
    deadline: float | None = None
    while any(code is None for code in [worker.poll() for worker in workers]):
        if stop.requested and not passed_on:
            passed_on = True
            for worker in workers:
                worker.process.send_signal(signal.SIGTERM)
        codes = {worker.process.returncode for worker in workers}
        if deadline is None and codes - _POLITE_CODES - {None, 0}:
            deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            break
        on_poll()
        time.sleep(_POLL_SECONDS)
    on_poll()


def _end(workers: Sequence[_Worker]) -> None:
    """Kill the workers that are still there; one that the kernel cannot end yet is left to it."""
    for worker in workers:
        worker.kill()
    deadline = time.monotonic() + _REAP_SECONDS
    while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
        time.sleep(_POLL_SECONDS)


def _first_failure(workers: Sequence[_Worker], folder: Path, stopped: bool) -> Failure | None:
    """The earliest failure; one that only followed from another counts if there is nothing else."""
    reports = read_failures(folder)
    failures = list(reports.values())
    for worker in workers:
        code = worker.process.returncode
        expected = code in (_STOPPED_CODES if stopped else _POLITE_CODES)
        if worker.rank in reports or worker.killed or not code or expected:
            continue
        failures.append(Failure(worker.rank, worker.ended_time or time.time(), _exit_message(code)))
    return min(failures, key=lambda failure: (not failure.own, failure.time), default=None)


def _exit_message(code: int) -> str:
    if code > 0:
        return f"exited with code {code} without saying why; see its output above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
