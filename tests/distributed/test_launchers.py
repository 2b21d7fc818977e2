"""The commands themselves, with new processes: own launcher, torchrun, several nodes, signals, failures."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from leantune.checkpoint.run_folder import RunFolder
from tests.distributed.poison import poisoned_model
from tests.distributed.ranks import Ranks, assert_same_curve, assert_same_weights, command, steps, until
from tests.fixtures import tiny_tokenizer

TEXT = "the capital of France is Paris and twelve people said the name of the old man"


@pytest.fixture
def place(model: Path, tmp_path: Path) -> Path:
    """A folder with run.yaml and 13 records."""
    words = TEXT.split()
    records = [
        {"prompt": " ".join(words[: 1 + i % 7]), "completion": " ".join(words[i % 5 : 6 + i % 9])}
        for i in range(13)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "records.jsonl").write_text(lines, encoding="utf-8")
    tree = {
        "model": str(model),
        "data": {"train": str(tmp_path / "records.jsonl")},
        "method": {"name": "lora", "rank": 4},
        "train": {
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "epochs": 2,
            "learning_rate": 0.01,
            "device": "cpu",
        },
        "output": {"checkpoint_every_steps": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return tmp_path


def torchrun(place: Path, *arguments: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocess.Popen(
        [*launcher, "-m", "leantune", *arguments],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_launches_at_once_and_torchrun_give_the_curve_of_one_process(place: Path) -> None:
    """Runs met in each other's rendezvous or folder; torchrun needed its number of devices in the file."""
    elsewhere = torchrun(place, "train", "run.yaml", "output.dir=by-torchrun")
    one = command("train", "run.yaml", "output.dir=one", cwd=place, name="one")
    assert one.wait() == [0], one.output()
    both = [command("train", "run.yaml", "strategy.devices=2", cwd=place, name=name) for name in ("a", "b")]
    for ranks in both:
        assert ranks.wait(120) == [0], ranks.output()
    shown = elsewhere.communicate(timeout=120)[0]
    assert elsewhere.returncode == 0, shown
    assert sorted(path.name for path in (place / "runs").iterdir()) == ["run", "run-2"]
    reference = RunFolder.open(place / "one")
    assert len(steps(reference)) == 8
    for name in ("runs/run", "runs/run-2", "by-torchrun"):
        assert_same_curve(reference, RunFolder.open(place / name), rel=1e-5)
        assert_same_weights(reference, RunFolder.open(place / name), atol=2e-4)
    for text in (both[0].output(), shown):  # rank 0 alone speaks
        assert text.count("step 8/8") == 1
        assert text.count("13 of 13 records kept") == 1
        assert text.count("run folder: ") == 1


def test_another_number_of_processes_than_in_the_file_is_refused(place: Path) -> None:
    """torchrun's processes trained with a batch that was worked out for another number of devices."""
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    refused = command("train", "run.yaml", "strategy.devices=4", cwd=place, **environ)
    assert refused.wait() == [2]
    assert "strategy.devices: 4, but torchrun started 2 processes" in refused.output()
    assert not (place / "runs").exists()


def nodes(place: Path, *arguments: str) -> list[Ranks]:
    """The same command as two machines would give it, each in a folder of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    started: list[Ranks] = []
    for node in ("0", "1"):
        cwd = place / f"node-{node}"
        (cwd / "tmp").mkdir(parents=True, exist_ok=True)
        options = ["--nnodes", "2", "--node_rank", node, "--rdzv_endpoint", endpoint]
        environ = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0"}
        started.append(command(*arguments, *options, cwd=cwd, TMPDIR=str(cwd / "tmp"), **environ))
    return started


def test_two_machines_train_stop_and_resume_one_run(place: Path) -> None:
    """The second machine made a run of its own, sought the first one's, or failed when the other stopped."""
    settings = ["strategy.devices=2", "train.epochs=100", "output.dir=run"]
    first, second = nodes(place, "train", "../run.yaml", *settings)
    folder = first.folder
    until(lambda: folder.metrics.exists() and len(steps(folder)) > 2)
    second.signal(signal.SIGTERM)
    assert [first.wait(30), second.wait(30)] == [[143], [143]], first.output() + second.output()
    done = len(steps(folder))
    assert f"stopped after step {done}; continue with: leantune resume run" in first.output()
    assert not folder.result.exists()
    epochs = (done + 3) / 4
    shorten(folder, epochs)
    first, second = nodes(place, "resume", str(folder.path))
    assert first.wait(120) == [0], first.output() + second.output()
    assert second.wait(20) == [0], second.output()
    assert f"continuing after step {done} from " in first.output()
    assert "step " not in second.output()
    assert sorted(path.name for path in (place / "node-1").iterdir()) == ["command.log", "tmp"]
    for node in (0, 1):
        assert not list((place / f"node-{node}" / "tmp").iterdir()), "scratch files are left behind"
    one = command("train", "run.yaml", f"train.epochs={epochs}", "output.dir=one", cwd=place)
    assert one.wait() == [0], one.output()
    assert_same_curve(RunFolder.open(place / "one"), folder, rel=1e-5)
    assert_same_weights(RunFolder.open(place / "one"), folder, atol=2e-4)


def shorten(folder: RunFolder, epochs: float) -> None:
    """Let a long run end soon, so that the test does; its rate is constant, so no step becomes another."""
    text = folder.config.read_text()
    assert "epochs: 100.0" in text
    folder.config.write_text(text.replace("epochs: 100.0", f"epochs: {epochs}"))


@pytest.mark.parametrize(
    ("number", "code", "devices"),
    [(signal.SIGTERM, 143, 1), (signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 2)],
)
def test_a_signal_from_outside_saves_and_resume_completes(
    number: signal.Signals, code: int, devices: int, place: Path
) -> None:
    """The signal cost the work since the last checkpoint, or the exit code said that all was well."""
    settings = [f"strategy.devices={devices}", "train.epochs=100", "output.dir=run"]
    stopped = command("train", "run.yaml", *settings, cwd=place, name="stopped")
    until(lambda: stopped.folder.metrics.exists() and len(steps(stopped.folder)) > 2)
    stopped.signal(number)
    assert stopped.wait(30) == [code], stopped.output()
    done = len(steps(stopped.folder))
    assert 2 < done < 400
    shown = stopped.output()
    assert shown.count("stopping after this step; press Ctrl-C again to abort") == 1
    assert f"stopped after step {done}; continue with: leantune resume run" in shown
    assert "Traceback" not in shown
    if number == signal.SIGINT:
        return
    shorten(stopped.folder, (done + 3) / 4)
    again = command("resume", "run", "strategy.devices=1", cwd=place, name="again")
    assert again.wait() == [0], again.output()
    assert f"continuing after step {done} from " in again.output()
    assert [row["step"] for row in steps(stopped.folder)] == list(range(1, done + 4))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_that_is_alive_is_neither_resumed_nor_replaced(devices: int, place: Path) -> None:
    """`resume` in a second terminal cut the metrics of the live run off and removed its checkpoints."""
    settings = [f"strategy.devices={devices}", "train.epochs=10000", "output.dir=run"]
    live = command("train", "run.yaml", *settings, cwd=place, name="live", TMPDIR=str(place))
    until(lambda: live.folder.metrics.exists() and len(steps(live.folder)) > 2)
    before = live.folder.config.read_bytes()
    resumed = command("resume", "run", cwd=place, name="resumed")
    replaced = command(
        "train", "run.yaml", "output.dir=run", "output.overwrite=true", cwd=place, name="replaced"
    )
    for refused in (resumed, replaced):
        assert refused.wait(30) == [1], refused.output()
        assert f"run is in use by process {live.processes[0].pid} on " in refused.output()
    assert live.processes[0].is_alive()
    assert live.folder.config.read_bytes() == before
    assert [row["step"] for row in steps(live.folder)][:3] == [1, 2, 3]
    live.signal(signal.SIGKILL)
    assert live.wait(30) == [-signal.SIGKILL]
    time.sleep(0.5 if devices > 1 else 0)  # the kernel ends the workers of a killed launcher
    done = len(steps(live.folder))
    text = live.folder.config.read_text()
    live.folder.config.write_text(text.replace("epochs: 10000.0", f"epochs: {(done + 3) / 4}"))
    again = command("resume", "run", "strategy.devices=1", cwd=place, name="again")
    assert again.wait() == [0], again.output()


def test_a_failing_rank_is_shown_first_and_within_seconds(place: Path, tmp_path: Path) -> None:
    """The user saw `Connection closed by peer` of the rank that had done nothing wrong."""
    sign = "€"
    lines = (place / "records.jsonl").read_text().splitlines()
    lines[9] = json.dumps({**json.loads(lines[9]), "prompt": sign})
    (place / "records.jsonl").write_text("\n".join(lines) + "\n")
    model = poisoned_model(tmp_path / "poisoned", tiny_tokenizer()(sign)["input_ids"][0])
    began = time.monotonic()
    settings = [f"model.name={model}", "strategy.devices=2", "train.micro_batch_size=1"]
    failed = command("train", "run.yaml", *settings, cwd=place)
    assert failed.wait() == [1]
    assert time.monotonic() - began < 60
    errors = [line for line in failed.output().splitlines() if line.startswith("leantune train: ")]
    assert len(errors) == 1
    assert errors[0].startswith("leantune train: rank ")
    assert "the loss is nan; records of the micro-batches concerned (counted from 0): 9 (on rank" in errors[0]


def test_a_failure_before_training_leaves_no_run_folder(place: Path) -> None:
    """A target that matches nothing was found late, and the next try met the folder of the first one."""
    settings = ["output.dir=run", "method.target_modules=[nothing_like_it]"]
    failed = command("train", "run.yaml", *settings, cwd=place)
    assert failed.wait() == [1]
    assert "nothing_like_it" in failed.output()
    assert not (place / "run").exists()


def test_bad_data_under_torchrun_is_told_and_keeps_no_rank_waiting(place: Path) -> None:
    """Rank 1 waited for rank 0, which had found no readable record, and was deaf to torchrun's SIGTERM."""
    (place / "records.jsonl").write_text('{"prompt": "a"}\n')
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    first, second = (
        command("train", "run.yaml", cwd=place, name=rank, RANK=rank, LOCAL_RANK=rank, **shared)
        for rank in "01"
    )
    assert first.wait() == [1]
    assert f"rank 0: data.train: {place / 'records.jsonl'}: " in first.output()
    second.signal(signal.SIGTERM)
    assert second.wait(5) == [-signal.SIGTERM]
    assert not (place / "runs").exists()


def test_options_for_machines_are_obeyed_or_refused(place: Path) -> None:
    """A node rank without nodes was ignored, and both machines trained alone."""
    for options, words in (
        (["--node_rank", "1"], "node rank 1 is not one of 0 to 0, for 1 nodes"),
        (["--rdzv_endpoint", "a:29500"], "one node has nobody to meet"),
        (["--nnodes", "2"], "2 nodes need an endpoint"),
    ):
        refused = command("train", "run.yaml", *options, cwd=place)
        assert refused.wait()[0] in (1, 2)
        assert words in refused.output()
        assert not (place / "runs").exists()
