"""Runs of several real ranks, without starting Python anew for each: a server imports torch once and forks.

`make_run` writes a run folder around given records, `start` forks the ranks that work on it. Each
rank runs `leantune rank FOLDER`, as the launcher's workers do; gloo connects them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from leantune.checkpoint.run_folder import CONFIG, RunFolder
from leantune.config import to_yaml, validate
from leantune.config.resume import resumed_config
from leantune.data.encode import with_facts
from leantune.data.records import DataFacts, EncodedRecords
from leantune.train.steps import plan_steps

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["pytest", "leantune.train.session", "transformers.models.llama.modeling_llama"]
)


_started: list[Any] = []


def warm_up() -> None:
    """Start the server, so that the seconds of its imports count for no test."""
    fork(bool).join()


def end_all() -> None:
    """Kill what a failed test has left running."""
    for process in _started:
        process.kill()
        process.join()
    _started.clear()


def fork(target: Callable[..., object], *arguments: object) -> Any:
    """A process of the server that runs `target(*arguments)`; it is ended with the test."""
    process = _SERVER.Process(target=target, args=arguments, daemon=True)
    process.start()
    _started.append(process)
    return process


def make_records(
    answers: Sequence[int], *, prompts: Sequence[int] = (3, 9, 5), seed: int = 0
) -> EncodedRecords:
    """Random records: record i has answers[i] supervised tokens after a prompt of cycling length."""
    generator = np.random.default_rng(seed)
    lengths = [(prompts[i % len(prompts)], count) for i, count in enumerate(answers)]
    total = sum(prompt + answer for prompt, answer in lengths)
    supervised = [flag for prompt, answer in lengths for flag in [False] * prompt + [True] * answer]
    records = EncodedRecords(
        tokens=generator.integers(6, 260, total, dtype=np.int32),
        supervised=np.array(supervised, dtype=np.bool_),
        offsets=np.cumsum([0, *(prompt + answer for prompt, answer in lengths)], dtype=np.int64),
        prompt_lengths=np.array([prompt for prompt, _ in lengths], dtype=np.int64),
        sample_ids=np.arange(len(lengths), dtype=np.int64),
        facts=DataFacts("test", "text", "plain", len(lengths), len(lengths), 0),
    )
    return with_facts(records)


def make_run(
    path: Path,
    model: Path,
    records: EncodedRecords,
    validation: EncodedRecords | None = None,
    /,
    *,
    devices: int = 1,
    **sections: Any,
) -> RunFolder:
    """A prepared run folder, as `leantune train` leaves it for its ranks."""
    tree: dict[str, Any] = {
        "model": {"name": str(model)},
        "data": {"train": "records.jsonl", "validation": "more.jsonl" if validation else None},
        "strategy": {"devices": devices},
        **sections,
        "train": {"micro_batch_size": 2, "learning_rate": 1e-2, "device": "cpu", **sections.get("train", {})},
    }
    config = validate(tree)
    plan = plan_steps(config.train, len(records), devices)
    batches = {"global_batch_size": plan.global_batch_size, "gradient_accumulation_steps": None}
    folder = RunFolder.create(str(path), "run", False)
    folder.records.mkdir()
    records.save(folder.records / "train.safetensors")
    if validation is not None:
        validation.save(folder.records / "validation.safetensors")
    resolved = config.model_copy(update={"train": config.train.model_copy(update=batches)})
    folder.write_config(to_yaml(resolved))
    return folder


@dataclass
class Ranks:
    """The running ranks of one run."""

    folder: RunFolder
    processes: list[Any]
    logs: list[Path]

    def wait(self, seconds: float = 90.0) -> list[int]:
        """The exit codes, by rank; ranks that have not ended in time are killed and the test fails."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self.signal(signal.SIGKILL)
        assert not hung, f"ranks {hung} hang: {self.output()}"
        return [process.exitcode for process in self.processes]

    def finish(self) -> RunFolder:
        """Wait for a run that must succeed."""
        codes = self.wait()
        assert codes == [0] * len(codes), self.output()
        return self.folder

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank that is still there."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def output(self) -> str:
        """What the ranks have printed, rank by rank."""
        return "\n".join(log.read_text() for log in self.logs if log.exists())


def start(
    folder: RunFolder,
    *,
    folders: Mapping[int, RunFolder] | None = None,
    before: Callable[..., None] | None = None,
    **options: Any,
) -> Ranks:
    """Fork as many ranks as the run has devices. `folders`: ranks that read another folder.

    `before(**options)` is called in each rank before it starts to work.
    """
    config = validate_folder(folder)
    size = config.strategy.devices
    meeting = Path(f"{folder.path}-meeting-{time.monotonic_ns()}")
    meeting.mkdir()
    logs = [meeting / f"log-{rank}" for rank in range(size)]
    places = [str((folders or {}).get(rank, folder).path) for rank in range(size)]
    processes = [
        fork(_rank, place, rank, size, str(meeting), before, options) for rank, place in enumerate(places)
    ]
    return Ranks(folder, processes, logs)


def command(*arguments: str, cwd: Path, name: str = "command", **environ: str) -> Ranks:
    """Fork one `leantune ARGUMENTS` in the folder `cwd`; the workers that it launches are new processes."""
    log = cwd / f"{name}.log"
    return Ranks(RunFolder(cwd / "run"), [fork(_command, arguments, str(cwd), str(log), environ)], [log])


def run(path: Path, model: Path, records: EncodedRecords, /, *more: Any, **sections: Any) -> Ranks:
    """`make_run` and `start`."""
    return start(make_run(path, model, records, *more, **sections))


def move(folder: RunFolder, devices: int) -> RunFolder:
    """Put a run on so many devices, as `leantune resume RUN strategy.devices=N` does."""
    config = resumed_config(folder.path / CONFIG, [f"strategy.devices={devices}"], {})
    folder.write_config(to_yaml(config))
    return folder


def validate_folder(folder: RunFolder) -> Any:
    """The configuration in a run folder."""
    from leantune.config import load_config

    return load_config(folder.config)


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    """All rows of metrics.jsonl."""
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def steps(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of the steps."""
    return [row for row in rows(folder) if "loss" in row]


def evaluations(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of the evaluations."""
    return [row for row in rows(folder) if "eval_loss" in row]


def weights(folder: RunFolder) -> dict[str, Any]:
    """What was trained, as it was saved."""
    place = folder.model if folder.model.is_dir() else folder.adapter
    return {k: v for file in sorted(place.glob("*.safetensors")) for k, v in load_file(file).items()}


def assert_same_curve(one: RunFolder, other: RunFolder, rel: float) -> None:
    """Same steps, same rates, same token counts; losses and gradient norms within `rel`."""
    first, second = steps(one), steps(other)
    for key in ("step", "epoch", "learning_rate", "total_tokens", "supervised_tokens", "records", "pairs"):
        assert [row.get(key) for row in first] == [row.get(key) for row in second], key
    np.testing.assert_allclose([r["loss"] for r in first], [r["loss"] for r in second], rtol=rel, atol=0)
    norms = [row["grad_norm"] for row in first], [row["grad_norm"] for row in second]
    np.testing.assert_allclose(*norms, rtol=100 * rel, atol=0)


def assert_same_weights(one: RunFolder, other: RunFolder, atol: float) -> None:
    """The same tensors, within `atol`."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=0, atol=atol, err_msg=name)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition; the test fails if it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.002)


def spy(path: str) -> None:
    """Write down which samples each step of this rank goes through; for `start(..., before=spy)`."""
    from leantune.train.run import Run

    plain = Run.micro_batch
    rank = os.environ.get("RANK", "0")

    def micro_batch(self: Run, window: Any, index: int, step: int) -> Any:
        batch = plain(self, window, index, step)
        with Path(path, f"samples-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([step, index, batch.sample_ids]) + "\n")
        return batch

    Run.micro_batch = micro_batch  # pyright: ignore[reportAttributeAccessIssue]


def observe(path: str, stop_at: tuple[int, int] | None = None, die_at: int | None = None) -> None:
    """Record samples; at (step, micro-batch), counted from 0, this rank gets a SIGTERM, or at a step dies."""
    from leantune.train.run import Run

    spy(path)
    plain = Run.micro_batch

    def micro_batch(self: Run, window: Any, index: int, step: int) -> Any:
        if (step, index) == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, window, index, step)

    Run.micro_batch = micro_batch  # pyright: ignore[reportAttributeAccessIssue]


def samples(path: Path) -> list[list[int]]:
    """What `spy` saw: the samples of each step on all ranks, in the order of the micro-batches."""
    lines = [
        json.loads(line) for file in path.glob("samples-*.jsonl") for line in file.read_text().splitlines()
    ]
    windows: dict[int, list[int]] = {}
    for step, _, ids in sorted(lines):
        windows.setdefault(step, []).extend(ids)
    assert list(windows) == list(range(len(windows))), "a step is missing"
    return list(windows.values())


def _rank(
    folder: str, rank: int, size: int, meeting: str, before: Callable[..., None] | None, options: Any
) -> None:
    settle(f"{meeting}/log-{rank}", rank_environ(rank, size, meeting))
    from leantune.cli.main import main

    if before is not None:
        before(**options)
    sys.exit(main(["rank", folder]))


def rank_environ(rank: int, size: int, meeting: str) -> dict[str, str]:
    """What the launcher tells a rank; nothing if it is alone."""
    if size == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "LEANTUNE_STORE_FILE": f"{meeting}/store",
    }


def _command(arguments: Sequence[str], cwd: str, log: str, environ: Mapping[str, str]) -> None:
    settle(log, environ)
    os.chdir(cwd)
    from leantune.cli.main import main

    sys.exit(main(arguments))


def settle(log: str, environ: Mapping[str, str]) -> None:
    """Make a forked process what a new one is: its own output, environment and signal handlers."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {"OMP_NUM_THREADS": "1", **environ}
    import torch

    torch.set_num_threads(1)
