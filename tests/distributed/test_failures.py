"""One rank fails: the whole job ends at once, says why, and has changed nothing."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from leantune.checkpoint.run_folder import RunFolder
from leantune.data.records import EncodedRecords
from tests.distributed.poison import poisoned_model
from tests.distributed.ranks import make_records, make_run, run, start, steps, weights
from tests.fixtures import tiny_model_folder

RECORDS = make_records([1 + i % 7 for i in range(16)])
POISON = 300  # a token that no ordinary record holds


def with_poison(records: EncodedRecords, index: int) -> EncodedRecords:
    tokens = records.tokens.copy()
    tokens[records.offsets[index]] = POISON
    return EncodedRecords(**{**records.__dict__, "tokens": tokens})


def copy(folder: RunFolder, path: Path) -> RunFolder:
    shutil.copytree(folder.path, path)
    return RunFolder.open(path)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_loss_that_is_nan_stops_every_rank_and_names_the_record(devices: int, tmp_path: Path) -> None:
    """Only the rank with the bad record stopped and the other hung; or NaN went into the weights."""
    model = poisoned_model(tmp_path / "model", POISON)
    output = {"checkpoint_every_steps": 1, "keep_checkpoints": 9}
    train = {"micro_batch_size": 1, "global_batch_size": 4, "learning_rate": 1e-3}
    sections = {"devices": devices, "method": "lora", "train": train, "output": output}
    began = time.monotonic()
    ranks = run(tmp_path / "run", model, with_poison(RECORDS, 11), **sections)
    assert ranks.wait() == [1] * devices
    assert time.monotonic() - began < 30
    done = len(steps(ranks.folder))
    for log in ranks.logs:
        message = log.read_text().splitlines()[-1]
        assert f"step {done + 1}: the loss is nan" in message
        where = ": 11 (on rank " if devices == 2 else ": 11. "
        assert where in message
        assert "Nothing was updated in this step" in message
    kept = list(ranks.folder.checkpoints.glob("step-*"))
    assert len(kept) == done
    for checkpoint in kept:
        tensors = load_file(checkpoint / "tensors.safetensors")
        assert all(bool(torch.isfinite(value).all()) for value in tensors.values())
    assert not ranks.folder.adapter.exists()


def test_records_that_one_rank_cannot_read_end_the_job(model: Path, tmp_path: Path) -> None:
    """Rank 0 waited in a collective for rank 1, which had failed before it."""
    folder = make_run(tmp_path / "run", model, RECORDS, devices=2)
    broken = copy(folder, tmp_path / "broken")
    (broken.records / "train.safetensors").write_bytes(b"\x00" * 20)
    began = time.monotonic()
    ranks = start(folder, folders={1: broken})
    assert ranks.wait() == [1, 1]
    assert time.monotonic() - began < 30
    assert "rank 1: " in ranks.logs[1].read_text()
    assert "train.safetensors is not a file of encoded records" in ranks.logs[1].read_text()
    assert "rank 0: lost contact with another rank" in ranks.logs[0].read_text()
    assert not folder.metrics.exists()


def crash(step: int) -> None:
    """Make rank 1 fail in its work of a step, as a device out of memory would."""
    import os

    from leantune.train.run import Run

    plain = Run.micro_batch

    def micro_batch(self: Run, window: object, index: int, at: int) -> object:
        if os.environ["RANK"] == "1" and at == step:
            raise RuntimeError("out of memory")
        return plain(self, window, index, at)  # pyright: ignore[reportArgumentType]

    Run.micro_batch = micro_batch  # pyright: ignore[reportAttributeAccessIssue]


def test_a_crash_in_the_middle_of_a_run_ends_the_job(model: Path, tmp_path: Path) -> None:
    """The other rank hung in its sum of gradients, or went on alone."""
    folder = make_run(tmp_path / "run", model, RECORDS, devices=2)
    ranks = start(folder, before=crash, step=2)
    assert ranks.wait(30) == [1, 1]
    assert "rank 1: RuntimeError: out of memory" in ranks.logs[1].read_text()
    assert len(steps(folder)) == 2
    assert not folder.result.exists()


@pytest.mark.parametrize("what", ["weights", "records", "settings", "step"])
def test_ranks_that_would_not_do_the_same_are_refused(what: str, model: Path, tmp_path: Path) -> None:
    """A machine with another model, file, setting or checkpoint trained on without anybody noticing."""
    output = {"checkpoint_every_steps": 2}
    folder = make_run(tmp_path / "run", model, RECORDS, devices=2, output=output)
    if what == "step":
        ranks = start(folder)
        ranks.finish()
    other = copy(folder, tmp_path / "other")
    if what == "weights":
        elsewhere = tiny_model_folder(tmp_path / "model", seed=1)
        other.config.write_text(other.config.read_text().replace(str(model), str(elsewhere)))
    elif what == "records":
        with_poison(RECORDS, 3).save(other.records / "train.safetensors")
    elif what == "settings":
        text = other.config.read_text()
        other.config.write_text(text.replace("learning_rate: 0.01", "learning_rate: 0.02"))
        assert other.config.read_text() != text
    else:
        shutil.rmtree(max(other.checkpoints.glob("step-*")))
    before = weights(folder) if what == "step" else {}
    ranks = start(folder, folders={1: other})
    assert ranks.wait() == [1, 1]
    message = f"before the first step rank 1 and rank 0 differ in their {what}; "
    assert message in ranks.logs[0].read_text()
    assert message in ranks.logs[1].read_text()
    assert {name: value.tolist() for name, value in before.items()} == (
        {name: value.tolist() for name, value in weights(folder).items()} if before else {}
    )
    assert folder.metrics.exists() == (what == "step")


def test_the_same_start_on_both_ranks_is_accepted(model: Path, tmp_path: Path) -> None:
    """The check refused ranks whose model and records merely lie in other folders."""
    folder = make_run(tmp_path / "run", model, RECORDS, devices=2, train={"max_steps": 1})
    other = copy(folder, tmp_path / "other")
    elsewhere = shutil.copytree(model, tmp_path / "model")
    other.config.write_text(other.config.read_text().replace(str(model), str(elsewhere)))
    start(folder, folders={1: other}).finish()
    assert {path.name for path in other.path.iterdir()} == {"run.yaml", "records"}


def test_a_rank_that_is_killed_ends_the_job(model: Path, tmp_path: Path) -> None:
    """The kernel killed one rank for its memory and the other one waited for ever."""
    folder = make_run(tmp_path / "run", model, RECORDS, devices=2, train={"epochs": 500.0})
    ranks = start(folder)
    while not folder.metrics.exists() or len(steps(folder)) < 3:
        time.sleep(0.01)
    ranks.processes[1].kill()
    assert ranks.wait(30) == [1, -signal.SIGKILL]
    assert "rank 0: lost contact with another rank" in ranks.logs[0].read_text()
