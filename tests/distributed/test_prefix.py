"""The frozen prefix on several ranks, and in runs that are killed and go on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leantune.checkpoint.run_folder import RunFolder
from tests.distributed.ranks import (
    evaluations,
    make_records,
    make_run,
    move,
    observe,
    run,
    start,
    steps,
    weights,
)

# 29 records do not divide into windows of 8: in some passes a rank has no records.
RECORDS = make_records([1 + (7 * i) % 40 for i in range(29)])
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"name": "lora", "rank": 4, "dropout": 0.1, "layers": [2]},
    "loreft": {"name": "loreft", "rank": 4, "layers": [1, 2], "position": "f2+l2"},
}


def settings(method: str, mode: str, **train: Any) -> dict[str, Any]:
    batches = {"micro_batch_size": 2, "global_batch_size": 8, "epochs": 3.0, "learning_rate": 1e-2}
    return {
        "method": METHODS[method],
        "output": {"checkpoint_every_steps": 3},
        "train": {**batches, "cache_frozen_prefix": mode, **train},
    }


def curve(folder: RunFolder) -> list[float]:
    """All losses, of training and of validation."""
    return [row["loss"] for row in steps(folder)] + [row["eval_loss"] for row in evaluations(folder)]


def assert_equal(one: RunFolder, other: RunFolder) -> None:
    """The same losses and weights, to the bit."""
    assert len(set(curve(one))) >= 12
    assert curve(one) == curve(other)
    first, second = weights(one), weights(other)
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_that_skip_their_prefix_learn_the_same(
    strategy: str, method: str, model: Path, tmp_path: Path
) -> None:
    """Ranks that skip blocks while others compute them must still gather and sum with them."""
    place = {"name": strategy, "devices": 2}
    checkpointed = {"activation_checkpointing": strategy == "fsdp"}
    started = {
        mode: run(
            tmp_path / mode,
            model,
            RECORDS,
            RECORDS,
            devices=2,
            strategy=place,
            **settings(method, mode, **checkpointed),
        )
        for mode in ("off", "memory", "disk")
    }
    off, *others = [ranks.finish() for ranks in started.values()]
    for kept in others:
        assert_equal(off, kept)
        assert not kept.prefix.exists()
    for mode in ("memory", "disk"):
        assert "frozen prefix: 2 of 3 blocks are computed once" in started[mode].output()


def test_one_rank_and_two_see_the_same_order(model: Path, tmp_path: Path) -> None:
    """Windows that stay together must not depend on the number of ranks."""
    one = run(tmp_path / "one", model, RECORDS, **settings("loreft", "memory"))
    two = run(tmp_path / "two", model, RECORDS, devices=2, **settings("loreft", "memory", micro_batch_size=1))
    np.testing.assert_allclose(curve(one.finish()), curve(two.finish()), rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_killed_run_goes_on_with_its_files(devices: int, model: Path, tmp_path: Path) -> None:
    """A file that was half written, or lost, is computed again; the others are used."""
    off = run(tmp_path / "off", model, RECORDS, devices=devices, **settings("lora", "off"))
    folder = make_run(tmp_path / "killed", model, RECORDS, devices=devices, **settings("lora", "disk"))
    (tmp_path / "seen").mkdir()
    start(folder, before=observe, path=str(tmp_path / "seen"), die_at=7).wait()
    files = sorted(folder.prefix.rglob("*.safetensors"))
    assert len(files) >= 15
    files[0].write_bytes(files[0].read_bytes()[:-7])
    files[1].unlink()
    untouched = files[2].stat().st_mtime_ns
    again = start(folder, before=observe, path=str(tmp_path / "seen"), die_at=10)
    assert -signal.SIGKILL in again.wait()
    assert files[2].stat().st_mtime_ns == untouched
    assert files[0].exists()
    start(folder).finish()
    assert_equal(off.finish(), folder)
    assert not folder.prefix.exists()


def test_a_run_that_moves_to_other_devices_starts_its_files_anew(model: Path, tmp_path: Path) -> None:
    """Its micro-batches are others then."""
    single = run(tmp_path / "single", model, RECORDS, **settings("loreft", "off"))
    folder = make_run(tmp_path / "moved", model, RECORDS, **settings("loreft", "disk", micro_batch_size=8))
    (tmp_path / "seen").mkdir()
    start(folder, before=observe, path=str(tmp_path / "seen"), die_at=7).wait()
    (before,) = folder.prefix.glob("*/*")
    ranks = start(move(folder, 2), before=observe, path=str(tmp_path / "seen"), die_at=10)
    ranks.wait()
    (after,) = folder.prefix.glob("*/*")
    assert before.name != after.name
    start(folder).finish()
    np.testing.assert_allclose(curve(single.finish()), curve(folder), rtol=1e-5)
