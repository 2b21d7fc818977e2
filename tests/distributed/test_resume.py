"""Stopped or killed anywhere and resumed on any number of ranks, a run is what it would have been."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from leantune.checkpoint.run_folder import RunFolder
from tests.distributed.ranks import (
    assert_same_curve,
    assert_same_weights,
    make_records,
    make_run,
    move,
    observe,
    rows,
    samples,
    start,
    steps,
    until,
)

RECORDS = make_records([1 + (7 * i) % 30 for i in range(21)])
# 6 steps an epoch (4 micro-batches of one record each, the last window has one record), 12 in all.
SECTIONS: dict[str, Any] = {
    "method": {"name": "lora", "rank": 4, "dropout": 0.1},
    "train": {
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "epochs": 2.0,
        "schedule": {"name": "cosine", "warmup_steps": 4, "floor": 0.1},
        "optimizer": {"name": "adamw", "weight_decay": 0.1},
        "max_grad_norm": 0.5,
    },
    "output": {"checkpoint_every_steps": 5},
}


@pytest.fixture(scope="module")
def whole(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[RunFolder, list[list[int]]]]:
    """The run without a stop, on 1 and on 2 ranks, and the samples of its steps."""
    path = tmp_path_factory.mktemp("whole")
    started = {}
    for devices in (1, 2):
        seen = path / f"seen-{devices}"
        seen.mkdir()
        folder = make_run(path / str(devices), model, RECORDS, devices=devices, **SECTIONS)
        started[devices] = (start(folder, before=observe, path=str(seen)), seen)
    return {devices: (ranks.finish(), samples(seen)) for devices, (ranks, seen) in started.items()}


def test_the_whole_runs_agree(whole: dict[int, Any]) -> None:
    """What the others are compared with must be right itself."""
    assert whole[1][1] == whole[2][1]
    assert len(whole[1][1]) == 12
    assert_same_curve(whole[1][0], whole[2][0], rel=1e-5)


@pytest.mark.parametrize(
    ("stop_at", "done"),
    [
        pytest.param((2, 0), 3, id="mid-epoch"),
        pytest.param((5, 0), 6, id="epoch-boundary"),
        pytest.param((7, 2), 8, id="inside-accumulation"),
    ],
)
@pytest.mark.parametrize("before", [1, 2])
def test_stop_and_resume(
    before: int, stop_at: tuple[int, int], done: int, whole: dict[int, Any], model: Path, tmp_path: Path
) -> None:
    """After a stop records were skipped or repeated, the schedule restarted, or moments were lost."""
    folder = make_run(tmp_path / "run", model, RECORDS, devices=before, **SECTIONS)
    (tmp_path / "seen").mkdir()
    # With two ranks only the one whose micro-batch it is gets the signal; both must stop.
    ranks = start(folder, before=observe, path=str(tmp_path / "seen"), stop_at=stop_at)
    assert ranks.wait() == [128 + signal.SIGTERM] * before
    assert f"stopped after step {done}; continue with: leantune resume" in ranks.output()
    assert [row["step"] for row in steps(folder)] == list(range(1, done + 1))
    assert not folder.adapter.exists()
    resumed = {}
    for after in (1, 2):
        shutil.copytree(folder.path, tmp_path / f"on-{after}")
        shutil.copytree(tmp_path / "seen", tmp_path / f"seen-{after}")
        moved = move(RunFolder.open(tmp_path / f"on-{after}"), after)
        resumed[after] = start(moved, before=observe, path=str(tmp_path / f"seen-{after}"))
    for after, continued in resumed.items():
        end = continued.finish()
        assert f"continuing after step {done} from " in continued.output()
        assert samples(tmp_path / f"seen-{after}") == whole[1][1]
        same = after == before
        assert_same_curve(whole[before][0], end, rel=1e-6 if same else 1e-5)
        assert_same_weights(whole[before][0], end, atol=1e-7 if same else 2e-4)


@pytest.mark.parametrize("after", [1, 2])
def test_killed_in_the_middle_of_a_step(
    after: int, whole: dict[int, Any], model: Path, tmp_path: Path
) -> None:
    """Steps after the last checkpoint stayed in metrics.jsonl and came a second time."""
    folder = make_run(tmp_path / "run", model, RECORDS, devices=2, **SECTIONS)
    ranks = start(folder, before=observe, path=str(tmp_path), die_at=8)
    assert set(ranks.wait()) == {-signal.SIGKILL}
    assert len(steps(folder)) == 8  # the checkpoint is that of step 5
    with folder.metrics.open("a") as file:
        file.write('{"step": 9, "lo')
    continued = start(move(folder, after))
    end = continued.finish()
    assert "continuing after step 5 from " in continued.output()
    assert_same_curve(whole[2][0], end, rel=1e-6 if after == 2 else 1e-5)
    assert_same_weights(whole[2][0], end, atol=1e-7 if after == 2 else 2e-4)


@pytest.mark.parametrize("seen", [0, 4, 9])
def test_killed_at_a_random_time(seen: int, whole: dict[int, Any], model: Path, tmp_path: Path) -> None:
    """Wherever the kill falls (also in the middle of a save), the next start finds its way."""
    sections = {**SECTIONS, "output": {"checkpoint_every_steps": 1}}
    folder = make_run(tmp_path / "run", model, RECORDS, devices=1, **sections)
    ranks = start(folder)
    until(lambda: folder.metrics.exists() and folder.metrics.read_bytes().count(b"\n") >= seen)
    ranks.signal(signal.SIGKILL)
    assert ranks.wait() == [-signal.SIGKILL]
    end = start(folder).finish()
    assert [row["step"] for row in rows(end)] == list(range(1, 13))
    assert_same_curve(whole[1][0], end, rel=1e-6)
    assert_same_weights(whole[1][0], end, atol=1e-7)


def die_in_save(step: int) -> None:
    """Die when the files of a checkpoint are written but not yet in place."""
    from leantune.checkpoint import store

    plain = store.write_folder

    def write_folder(target: Path, fill: Any) -> None:
        def fill_and_die(folder: Path) -> None:
            fill(folder)
            if target.name == f"step-{step:08d}":
                os.kill(os.getpid(), signal.SIGKILL)

        plain(target, fill_and_die)

    store.write_folder = write_folder


def test_killed_while_saving(whole: dict[int, Any], model: Path, tmp_path: Path) -> None:
    """A half-written checkpoint was taken for a whole one, or the whole one before it was gone."""
    sections = {**SECTIONS, "output": {"checkpoint_every_steps": 3, "keep_checkpoints": 1}}
    folder = make_run(tmp_path / "run", model, RECORDS, devices=1, **sections)
    assert start(folder, before=die_in_save, step=6).wait() == [-signal.SIGKILL]
    continued = start(folder)
    end = continued.finish()
    assert "step-00000006 was passed over: its save never finished" in continued.output()
    assert "continuing after step 3 from " in continued.output()
    assert [path.name for path in end.checkpoints.iterdir()] == ["step-00000012"]
    assert_same_curve(whole[1][0], end, rel=1e-6)
    assert_same_weights(whole[1][0], end, atol=1e-7)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("damage", ["truncate", "remove marker", "flip a bit"])
def test_a_broken_newest_checkpoint_is_reported_and_passed_over(
    damage: str, devices: int, whole: dict[int, Any], model: Path, tmp_path: Path
) -> None:
    """The newest checkpoint was loaded as it was, or the run ended although an older one was whole."""
    folder = make_run(tmp_path / "run", model, RECORDS, devices=1, **SECTIONS)
    start(folder, before=observe, path=str(tmp_path), stop_at=(7, 0)).wait()
    newest = folder.checkpoints / "step-00000008"
    data = bytearray((newest / "tensors.safetensors").read_bytes())
    if damage == "truncate":
        (newest / "tensors.safetensors").write_bytes(data[: len(data) // 2])
    elif damage == "flip a bit":
        data[-1] ^= 1
        (newest / "tensors.safetensors").write_bytes(data)
    else:
        (newest / "manifest.json").unlink()
    continued = start(move(folder, devices))
    end = continued.finish()
    shown = continued.output()
    assert shown.count(f"passed over: {newest} is not complete: ") == 1
    assert f"continuing after step 5 from {folder.checkpoints / 'step-00000005'}" in shown
    assert [row["step"] for row in rows(end)] == list(range(1, 13))
    assert_same_curve(whole[1][0], end, rel=1e-6 if devices == 1 else 1e-5)
    assert_same_weights(whole[1][0], end, atol=1e-7 if devices == 1 else 2e-4)


def test_a_finished_run_that_is_resumed_stays_what_it_is(whole: dict[int, Any], tmp_path: Path) -> None:
    """Another resume of a finished run trained on, or threw its metrics away."""
    shutil.copytree(whole[1][0].path, tmp_path / "again")
    again = start(RunFolder.open(tmp_path / "again")).finish()
    assert rows(again) == rows(whole[1][0])
    assert_same_weights(whole[1][0], again, atol=0)
    before, after = whole[1][0].read_json("result.json"), again.read_json("result.json")
    for key in ("ending", "steps", "first_loss", "last_loss", "tokens", "seconds"):
        assert before[key] == after[key], key


def test_a_run_killed_before_its_first_checkpoint_starts_over(
    whole: dict[int, Any], model: Path, tmp_path: Path
) -> None:
    """There was nothing to resume from, so the prepared run was lost."""
    folder = make_run(tmp_path / "run", model, RECORDS, devices=1, **SECTIONS)
    assert start(folder, before=observe, path=str(tmp_path), die_at=2).wait() == [-signal.SIGKILL]
    assert not folder.checkpoints.exists()
    end = start(folder).finish()
    assert_same_curve(whole[1][0], end, rel=1e-6)


@pytest.mark.parametrize("method", ["full", "loreft"])
def test_other_methods_resume_too(method: str, model: Path, tmp_path: Path) -> None:
    """State that only one method has (orthonormal factors, whole weights) was not in the checkpoint."""
    rate = {"full": 1e-3, "loreft": 1e-2}[method]
    train = {**SECTIONS["train"], "learning_rate": rate}
    sections = {**SECTIONS, "method": {"name": method}, "train": train}
    plain = start(make_run(tmp_path / "whole", model, RECORDS, devices=1, **sections))
    stopped = make_run(tmp_path / "run", model, RECORDS, devices=1, **sections)
    assert start(stopped, before=observe, path=str(tmp_path), stop_at=(6, 0)).wait() == [143]
    other = shutil.copytree(stopped.path, tmp_path / "two")
    one, two = start(stopped), start(move(RunFolder.open(other), 2))
    reference = plain.finish()
    assert_same_curve(reference, one.finish(), rel=1e-6)
    assert_same_weights(reference, stopped, atol=1e-7)
    assert_same_curve(reference, two.finish(), rel=1e-5)
    assert_same_weights(reference, two.folder, atol=2e-4)
