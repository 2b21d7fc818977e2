"""Checkpoints: bit-exact, complete or passed over, pruned without losing the best one."""

from __future__ import annotations

import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from leantune.checkpoint import atomic, store
from leantune.checkpoint.compare import same_bits
from leantune.checkpoint.store import BEST, STATE, TENSORS, CheckpointStore
from leantune.errors import CheckpointError


def numbers(seed: int) -> dict[str, Tensor]:
    return {"w": torch.full((4, 3), float(seed)), "step": torch.tensor(float(seed))}


def saved_steps(checkpoints: CheckpointStore) -> list[int]:
    return checkpoints.steps()


def test_odd_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "transposed": base.T,
        "row": base[1],
        "same_memory": base.view(-1),
        "twice": base.view(-1),
        "bf16": torch.randn(5).to(torch.bfloat16),
        "codes": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        "flags": torch.tensor([True, False]),
        "number": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "trained": torch.nn.Parameter(torch.randn(2)),
    }
    checkpoints = CheckpointStore(tmp_path, keep=1)
    path = checkpoints.save(10, tensors, {"loss": math.nan, "rates": (0.1, 0.2)})
    assert path.name == "step-00000010"
    back = checkpoints.load(path)
    assert back.step == 10
    assert back.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back.tensors[name].dtype == tensor.dtype
        assert back.tensors[name].shape == tensor.shape
        assert same_bits(back.tensors[name], tensor.detach().contiguous()), name
    assert math.isnan(back.state["loss"])
    assert back.state["rates"] == [0.1, 0.2]


@pytest.mark.parametrize("damage", ["bit", "dtype", "shape", "name"])
def test_a_disk_that_gives_back_something_else_keeps_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    checkpoints = CheckpointStore(tmp_path, keep=1)
    checkpoints.save(1, numbers(1), {})
    real = store.save_file

    def save_damaged(tensors: dict[str, Tensor], path: Path) -> None:
        damaged = {name: tensor.clone() for name, tensor in tensors.items()}
        if damage == "bit":
            damaged["w"].view(torch.int32)[0, 0] ^= 1
        elif damage == "dtype":
            damaged["w"] = damaged["w"].view(torch.int32)
        elif damage == "shape":
            damaged["w"] = damaged["w"].reshape(3, 4)
        else:
            del damaged["w"]
        real(damaged, path)

    monkeypatch.setattr(store, "save_file", save_damaged)
    with pytest.raises(CheckpointError, match=r"step-00000002 was not kept.* w differ from memory"):
        checkpoints.save(2, numbers(2), {})
    monkeypatch.undo()
    newest, lines = checkpoints.newest()
    assert newest is not None
    assert newest.step == 1
    assert lines == []


def test_only_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4, 5):
        checkpoints.save(step, numbers(step), {}, best=step == 2)
    assert saved_steps(checkpoints) == [2, 4, 5]
    best = checkpoints.best()
    assert best is not None
    assert best.step == 2
    checkpoints.save(6, numbers(6), {}, best=True)
    assert saved_steps(checkpoints) == [5, 6]
    assert sorted(p.name for p in tmp_path.iterdir()) == [BEST, "step-00000005", "step-00000006"]


def test_what_was_just_written_is_never_pruned(tmp_path: Path) -> None:
    """A run continued from an older checkpoint writes lower steps than those that lie there."""
    checkpoints = CheckpointStore(tmp_path, keep=1)
    checkpoints.save(30, numbers(30), {})
    checkpoints.save(20, numbers(20), {})
    assert 20 in saved_steps(checkpoints)


def test_a_broken_checkpoint_does_not_count_among_those_kept(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(step, numbers(step), {})
    (checkpoints.path_of(2) / TENSORS).write_bytes(b"x")
    checkpoints.save(3, numbers(3), {})
    assert saved_steps(checkpoints) == [1, 3]


def test_the_newest_complete_one_is_used_and_every_newer_broken_one_is_reported(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, keep=9)
    for step in (10, 20, 30, 40, 50):
        checkpoints.save(step, numbers(step), {})
    truncated = checkpoints.path_of(50) / TENSORS
    size = truncated.stat().st_size
    os.truncate(truncated, size - 4)
    (checkpoints.path_of(40) / "manifest.json").unlink()
    flipped = bytearray((checkpoints.path_of(30) / TENSORS).read_bytes())
    flipped[-1] ^= 1
    (checkpoints.path_of(30) / TENSORS).write_bytes(flipped)
    newest, lines = checkpoints.newest()
    assert newest is not None
    assert (newest.step, newest.path) == (20, checkpoints.path_of(20))
    assert torch.equal(newest.tensors["w"], numbers(20)["w"])
    assert len(lines) == 3
    assert f"step-00000050 is not complete: {TENSORS} is truncated: {size - 4} of {size} bytes" in lines[0]
    assert "step-00000040 is not complete: its completion marker" in lines[1]
    assert "step-00000030 is not complete: tensors.safetensors has changed" in lines[2]


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path / "none", keep=1)
    assert checkpoints.newest() == (None, [])
    assert checkpoints.best() is None
    assert checkpoints.clean() == []
    with pytest.raises(CheckpointError, match="the folder is missing"):
        checkpoints.load(checkpoints.path_of(3))


def run_in_child(work: object) -> int:
    """Fork, so that torch need not be imported again; returns the signal that ended the child (0: none)."""
    child = os.fork()
    if child == 0:
        try:
            work()  # type: ignore[operator]
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("replacing", [False, True])
def test_a_kill_at_any_moment_of_a_save_leaves_a_complete_newest_one(tmp_path: Path, replacing: bool) -> None:
    """Killed before each call that reaches the disk: the older or the new checkpoint, never less."""
    killed = 0
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        checkpoints = CheckpointStore(folder, keep=1)
        checkpoints.save(10, numbers(10), {"step": 10}, best=True)
        if replacing:
            checkpoints.save(20, numbers(19), {"step": 19})

        def save_and_die(checkpoints: CheckpointStore = checkpoints, moment: int = moment) -> None:
            calls = iter(range(1, 10**6))

            def dying(real: object) -> object:
                def call(*args: object, **kwargs: object) -> object:
                    if next(calls) == moment:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **kwargs)  # type: ignore[operator]

                return call

            for name in ("fsync", "rename", "replace"):
                setattr(atomic.os, name, dying(getattr(os, name)))
            atomic.shutil.rmtree = dying(shutil.rmtree)  # type: ignore[assignment]
            checkpoints.save(20, numbers(20), {"step": 20}, best=True)

        ended = run_in_child(save_and_die)
        checkpoints.clean()
        newest, _ = checkpoints.newest()
        assert newest is not None
        allowed = {10: (10,), 20: (19, 20) if replacing else (20,)}[newest.step]
        assert newest.state["step"] in allowed
        assert torch.equal(newest.tensors["w"], numbers(newest.state["step"])["w"])
        assert checkpoints.best() is not None
        assert not [p for p in folder.iterdir() if p.name.startswith(".")]
        if replacing:
            assert newest.step == 20
        if ended == 0:
            break
        assert ended == signal.SIGKILL
        killed += 1
    assert killed > 8


def test_a_save_that_was_killed_is_reported(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, keep=2)
    checkpoints.save(10, numbers(10), {})

    def save_and_die() -> None:
        store._write_tensors = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.save(20, numbers(20), {})

    assert run_in_child(save_and_die) == signal.SIGKILL
    newest, lines = checkpoints.newest()
    assert newest is not None
    assert newest.step == 10
    assert len(lines) == 1
    assert "step-00000020 was passed over: its save never finished" in lines[0]
    checkpoints.save(30, numbers(30), {})
    assert checkpoints.newest()[1] == []


def test_a_broken_best_is_an_error_not_a_silent_other_one(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, keep=1)
    path = checkpoints.save(1, numbers(1), {}, best=True)
    (path / STATE).write_text("{")
    with pytest.raises(CheckpointError, match=r"step-00000001 is not complete: state\.json is truncated"):
        checkpoints.best()
    for content in ("{", "[]", '{"checkpoint": "../elsewhere"}', '{"checkpoint": 3}'):
        (tmp_path / BEST).write_text(content)
        with pytest.raises(CheckpointError, match=r"best\.json"):
            checkpoints.best()


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match=r"generator is a torch\.Tensor"):
        checkpoints.save(1, numbers(1), {"generator": torch.get_rng_state()})
    with pytest.raises(CheckpointError, match="negative step -1"):
        checkpoints.save(-1, numbers(1), {})
    with pytest.raises(CheckpointError, match=r"tensors\.safetensors cannot hold"):
        checkpoints.save(1, {"w": torch.zeros(3).to_sparse()}, {})
    with pytest.raises(CheckpointError, match="0 checkpoints cannot be kept"):
        CheckpointStore(tmp_path, keep=0)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoints.load(tmp_path)
    assert checkpoints.steps() == []
