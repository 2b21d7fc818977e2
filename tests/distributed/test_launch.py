"""Starting, joining, failing and stopping with real processes (gloo, 2 ranks, CPU)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from leantune.errors import LaunchError
from leantune.strategies.failure import is_peer_lost
from leantune.strategies.launch import launch
from leantune.strategies.stop import StopRequest

WORKER = str(Path(__file__).with_name("launch_worker.py"))
COMMAND = [sys.executable, WORKER]
PARENT = f"""
import signal, sys
from leantune.strategies.launch import launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell job ignores it
launch(sys.argv[1:], devices_per_node=2, command=[sys.executable, {WORKER!r}])
"""
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def answers(folder: Path, name: str = "answers") -> list[Any]:
    return [json.loads((folder / f"{name}-{rank}").read_text()) for rank in (0, 1)]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@contextmanager
def parent_of(mode: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A separate process inside `launch`, once both of its workers have written their pids."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, mode, str(folder)],
        # A killed parent cannot remove its private folder.
        env={**os.environ, "TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
        text=True,
    )
    pids: list[int] = []
    try:
        assert until(lambda: all((folder / f"pid-{rank}").exists() for rank in (0, 1)))
        pids += answers(folder, "pid")
        yield process, pids
    finally:
        process.kill()
        for pid in pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_two_launches_at_once_do_not_clash(tmp_path: Path) -> None:
    """Two runs on one machine met in each other's rendezvous, or one found its port taken."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda f: launch(["talk", str(f)], devices_per_node=2, command=COMMAND), folders))
    for folder in folders:
        first, second = answers(folder)
        assert first["sum"] == second["sum"] == [3.0]
        assert first["objects"] == second["objects"] == [{"from": 0}, {"from": 1}]
        assert (first["main"], second["main"]) == (True, False)
        assert (first["world"], second["world"]) == ([0, 0, 2], [1, 1, 2])


def test_several_nodes_meet_at_the_endpoint(tmp_path: Path) -> None:
    """Ranks were counted within each machine, so that two nodes both had a rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"

    def node(node_rank: int) -> None:
        launch(
            ["talk", str(tmp_path)],
            devices_per_node=1,
            nodes=2,
            node_rank=node_rank,
            rdzv_endpoint=endpoint,
            # Two "machines" on one host: what a user would set where the host name leads nowhere.
            env={"GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0"},
            command=COMMAND,
        )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(node, (0, 1)))
    assert [answer["sum"] for answer in answers(tmp_path)] == [[3.0], [3.0]]
    assert [answer["world"] for answer in answers(tmp_path)] == [[0, 0, 2], [1, 0, 2]]


def test_first_error_and_its_rank_end_a_blocked_job(tmp_path: Path) -> None:
    """A rank waited in a collective for one that had failed, deaf to SIGTERM, and the job hung."""
    start = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(["fail_in_collective", str(tmp_path)], devices_per_node=2, command=COMMAND)
    assert time.monotonic() - start < 15
    assert str(caught.value) == "rank 1: records.jsonl, line 3: no field 'output'"
    assert not (tmp_path / "survived-0").exists()
    assert until(lambda: not alive(answers_pid(tmp_path)), 1)


def answers_pid(folder: Path) -> int:
    return json.loads((folder / "pid-0").read_text())


@linux_only
def test_a_worker_deaf_to_sigterm_is_ended_within_seconds(tmp_path: Path) -> None:
    """A worker inside a C call never runs its Python signal handler; elastic waits 30 s for it."""
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"^rank 1: a bad record$"):
        launch(["fail_beside_blocked", str(tmp_path)], devices_per_node=2, command=COMMAND)
    assert time.monotonic() - start < 5
    assert not alive(answers_pid(tmp_path))


def test_a_lost_peer_does_not_hide_the_error_behind_it(tmp_path: Path) -> None:
    """`Connection closed by peer` on rank 0 came in first and was shown instead of the cause."""
    with pytest.raises(LaunchError) as caught:
        launch(["peer_lost_first", str(tmp_path)], devices_per_node=2, command=COMMAND)
    message = str(caught.value)
    assert message.startswith("rank 1: KeyError: 'input_ids'\n")
    assert 'raise KeyError("input_ids")' in message, "an unexpected error needs its traceback"
    assert "closed by peer" not in message


@pytest.mark.parametrize(
    ("mode", "message"),
    [("exit_silently", "rank 1: exited with code 3"), ("segfault", "rank 1: was ended by SIGSEGV")],
)
def test_a_worker_that_dies_without_a_word_is_named(mode: str, message: str, tmp_path: Path) -> None:
    """A crash outside Python left no report, and the ranks killed because of it were blamed."""
    with pytest.raises(LaunchError) as caught:
        launch([mode, str(tmp_path)], devices_per_node=2, command=COMMAND)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_parent_lets_workers_finish(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    """Ctrl-C killed the workers in the middle of a step, before they could save."""
    with parent_of("train_until_stopped", tmp_path) as (parent, pids):
        parent.send_signal(number)
        _, shown = parent.communicate(timeout=15)
        assert parent.returncode == code
        assert answers(tmp_path, "checkpoint") == [True, True]
        assert shown.count("stopping after this step; press Ctrl-C again to abort") == 1
        assert "Traceback" not in shown
        assert not any(alive(pid) for pid in pids)


@linux_only
def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    """A step that never ended could not be aborted from the keyboard."""
    with parent_of("hang", tmp_path) as (parent, pids):
        parent.send_signal(signal.SIGINT)
        time.sleep(0.7)
        assert parent.poll() is None
        parent.send_signal(signal.SIGINT)
        parent.communicate(timeout=5)
        assert parent.returncode == 130
        assert not any(alive(pid) for pid in pids)


@linux_only
def test_no_orphans_after_the_parent_is_killed(tmp_path: Path) -> None:
    """Workers of a killed launcher kept the devices busy until somebody found them."""
    with parent_of("hang", tmp_path) as (parent, pids):
        assert all(alive(pid) for pid in pids)
        parent.kill()
        assert until(lambda: not any(alive(pid) for pid in pids), 5)


@linux_only
def test_a_worker_whose_parent_died_during_its_start_leaves(tmp_path: Path) -> None:
    """The parent died before the worker could ask to be told about it."""
    worker_env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LEANTUNE_PARENT_PID": str(2**22 + 1)}
    done = subprocess.run([*COMMAND, "hang", str(tmp_path)], env=worker_env, timeout=10, check=False)
    assert done.returncode == 1
    assert not (tmp_path / "pid-0").exists()


def test_torchrun_shows_our_message_first(tmp_path: Path) -> None:
    """Under somebody else's launcher the error was buried in the launcher's own report."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    done = subprocess.run(
        [*torchrun, WORKER, "fail_in_collective", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    message = "rank 1: records.jsonl, line 3: no field 'output'"
    assert done.returncode == 1
    own = [line for line in done.stderr.splitlines() if line.startswith(("rank ", "E", "Traceback"))]
    assert own[0] == message
    report = done.stderr.partition("Root Cause")[2]
    assert "rank      : 1" in report
    assert "records.jsonl, line 3: no field 'output'" in report


def test_torchrun_workers_join_and_leave(tmp_path: Path) -> None:
    """Joining worked only for workers of our own launcher."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, WORKER, "talk", str(tmp_path)], env=quiet, timeout=60, check=True)
    assert [answer["sum"] for answer in answers(tmp_path)] == [[3.0], [3.0]]


def test_cores_are_shared_out_unless_the_user_said_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker used every core; or the user's own OMP_NUM_THREADS was overwritten."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("leantune.strategies.launch._num_cores", lambda: 7)
    launch(["show_env", str(tmp_path)], devices_per_node=2, command=COMMAND)
    assert [env["OMP_NUM_THREADS"] for env in answers(tmp_path, "env")] == ["3", "3"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    launch(["show_env", str(tmp_path)], devices_per_node=2, env={"EXTRA": "yes"}, command=COMMAND)
    assert [env["OMP_NUM_THREADS"] for env in answers(tmp_path, "env")] == ["5", "5"]
    assert [env["EXTRA"] for env in answers(tmp_path, "env")] == ["yes", "yes"]
    folder = Path(answers(tmp_path, "env")[0]["LEANTUNE_REPORT_DIR"])
    assert not folder.exists(), "the private folder of the launch is left behind"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"devices_per_node": 0}, "must be at least 1"),
        ({"devices_per_node": 1, "nodes": 2, "node_rank": 2, "rdzv_endpoint": "a:1"}, "node rank 2"),
        ({"devices_per_node": 1, "nodes": 2}, "need an endpoint"),
        ({"devices_per_node": 1, "nodes": 2, "rdzv_endpoint": "node0"}, "'node0' is not of the form"),
        ({"devices_per_node": 1, "command": ["/no/such/program"]}, "rank 0: cannot start '/no/such/program'"),
    ],
)
def test_impossible_launches_are_refused(settings: dict[str, Any], words: str) -> None:
    """A launch that cannot work hung in its rendezvous instead of saying so."""
    with pytest.raises(LaunchError, match=words):
        launch([], **settings)


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain run on one device initialised a process group, or its helpers asked for one."""
    import torch

    from leantune.strategies import process

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    world = process.join("cpu", 1)
    assert world == process.World(0, 0, 1, torch.device("cpu"))
    assert world.is_main
    assert not torch.distributed.is_initialized()
    assert process.gather_objects("x") == ["x"]
    process.barrier()
    process.leave()


def test_an_incomplete_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that sets no LOCAL_RANK led to two ranks on one device."""
    from leantune.strategies import process

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(process, "die_with_parent", lambda: None)
    with pytest.raises(LaunchError, match="LOCAL_RANK is None"):
        process.join("cpu", 1)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:538] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Read error [127.0.0.1]:1: Connection reset by peer"), True),
        (RuntimeError("ncclRemoteError: A call failed possibly due to a network error"), True),
        (BrokenPipeError(32, "Broken pipe"), False),
        (LaunchError("Connection closed by peer"), False),
        (RuntimeError("CUDA out of memory"), False),
    ],
)
def test_lost_peers_are_told_from_own_errors(error: Exception, lost: bool) -> None:
    """`leantune ... | head` (a broken pipe) counted as somebody else's fault, and nothing was shown."""
    assert is_peer_lost(error) is lost


def test_stop_request_counts_presses_and_restores_handlers(capfd: pytest.CaptureFixture[str]) -> None:
    """One Ctrl-C that arrived twice aborted the run; or handlers stayed installed after it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopRequest() as stop:
            assert not stop.requested
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert stop.requested
            assert stop.signal == signal.SIGINT
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.55)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err.count("stopping after this step") == 1


def test_stop_request_outside_the_main_thread_installs_nothing() -> None:
    """signal.signal raises ValueError in a thread, e.g. in some notebooks and servers."""
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def body() -> None:
        with StopRequest() as stop:
            seen.extend([signal.getsignal(signal.SIGTERM), stop.requested])

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before, False]
