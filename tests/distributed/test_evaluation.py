"""Evaluation during training: the same losses on any number of ranks, the best checkpoint, early stopping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from leantune.checkpoint.store import CheckpointStore
from leantune.data.records import EncodedRecords
from tests.distributed.poison import poisoned_model
from tests.distributed.ranks import (
    assert_same_curve,
    evaluations,
    make_records,
    make_run,
    observe,
    rows,
    run,
    start,
    steps,
    weights,
)

TRAIN = make_records([1 + i % 9 for i in range(16)])
VALIDATION = make_records([1, 40, 3, 2, 17], seed=1)


def plain_loss(model: Path, records: EncodedRecords) -> float:
    """Mean token loss of a model folder, record by record."""
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = 0.0
    for index in range(len(records)):
        record = records[index]
        ids = torch.from_numpy(record.tokens.astype("int64"))[None]
        with torch.no_grad():
            logits = network(input_ids=ids).logits[0, :-1]
        answers = torch.from_numpy(record.supervised[1:].copy())
        total += float(F.cross_entropy(logits[answers], ids[0, 1:][answers], reduction="sum"))
    return total / records.facts.supervised_tokens


def test_ranks_evaluate_alike_and_rightly(model: Path, tmp_path: Path) -> None:
    """Ranks averaged their means, counted padding, left dropout on, or disturbed training with it."""
    sections: dict[str, Any] = {
        "method": {"name": "full"},
        "train": {"global_batch_size": 4, "learning_rate": 1e-3, "max_steps": 7, "epochs": 2.0},
        "eval": {"every_steps": 3},
        "output": {"checkpoints": False},
    }
    started = [
        run(tmp_path / "1", model, TRAIN, VALIDATION, devices=1, **sections),
        run(tmp_path / "2", model, TRAIN, VALIDATION, devices=2, **sections),
        run(
            tmp_path / "3",
            model,
            TRAIN,
            VALIDATION,
            **{**sections, "eval": {"every_steps": 3, "micro_batch_size": 5}},
        ),
        run(tmp_path / "4", model, TRAIN, **{**sections, "eval": {"keep_best": False}}),
    ]
    one, two, wide, without = [ranks.finish() for ranks in started]
    assert [row["step"] for row in evaluations(one)] == [3, 6, 7]
    losses = [row["eval_loss"] for row in evaluations(one)]
    assert [row["eval_loss"] for row in evaluations(two)] == pytest.approx(losses, rel=1e-5)
    assert [row["eval_loss"] for row in evaluations(wide)] == pytest.approx(losses, rel=1e-5)
    assert {row["eval_tokens"] for row in evaluations(two)} == {VALIDATION.facts.supervised_tokens}
    assert losses[-1] == pytest.approx(plain_loss(one.model, VALIDATION), rel=1e-5)
    assert_same_curve(one, two, rel=1e-5)
    assert_same_curve(one, without, rel=1e-6)
    assert two.read_json("result.json")["eval_loss"] == evaluations(two)[-1]["eval_loss"]


@pytest.mark.parametrize("devices", [1, 2])
def test_the_best_checkpoint_outlives_the_newest_ones(devices: int, model: Path, tmp_path: Path) -> None:
    """The best checkpoint was pruned as an old one, or early stopping counted wrongly."""
    sections: dict[str, Any] = {
        "method": {"name": "full"},
        # So high a rate on other records that validation gets worse after a few steps.
        "train": {"global_batch_size": 4, "learning_rate": 0.02, "epochs": 50.0},
        "eval": {"every_steps": 1, "early_stop_patience": 4},
        "output": {"checkpoint_every_steps": 1, "keep_checkpoints": 2},
    }
    ranks = run(tmp_path / "run", model, TRAIN, VALIDATION, devices=devices, **sections)
    folder = ranks.finish()
    losses = [row["eval_loss"] for row in evaluations(folder)]
    best = losses.index(min(losses)) + 1
    last = best + 4
    assert len(steps(folder)) == len(losses) == last < 200
    kept = sorted(path.name for path in folder.checkpoints.glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (best, last - 1, last)]
    checkpoint = CheckpointStore(folder.checkpoints, 2).best()
    assert checkpoint is not None
    assert checkpoint.step == best
    result = folder.read_json("result.json")
    assert (result["ending"], result["best_step"], result["steps"]) == ("early_stop", best, last)
    # What is exported are the best weights, not the last ones.
    assert result["exported_step"] == best
    assert (
        f"exporting the best weights: step {best}, validation loss {losses[best - 1]:.4f}" in ranks.output()
    )
    assert plain_loss(folder.model, VALIDATION) == pytest.approx(losses[best - 1], rel=1e-5)
    exported = weights(folder)
    # A second resume finds nothing more to do.
    before = rows(folder)
    again = start(folder).finish()
    assert rows(again) == before
    assert again.read_json("result.json")["ending"] == "early_stop"
    assert again.read_json("result.json")["exported_step"] == best
    assert all((weights(again)[name] == value).all() for name, value in exported.items())


def test_evaluation_at_the_end_of_each_epoch_is_the_default(model: Path, tmp_path: Path) -> None:
    """Validation records without eval.every_steps were never looked at."""
    sections: dict[str, Any] = {
        "train": {"global_batch_size": 6, "epochs": 1.5},
        "eval": {"keep_best": False},
    }
    folder = make_run(tmp_path / "run", model, TRAIN, VALIDATION, **sections)
    start(folder).finish()
    assert [row["step"] for row in evaluations(folder)] == [3, 5]
    assert not (folder.checkpoints / "best.json").exists()
    assert folder.read_json("result.json")["exported_step"] == 5


@pytest.mark.parametrize("devices", [1, 2])
def test_a_validation_loss_that_is_nan_ends_the_run(devices: int, tmp_path: Path) -> None:
    """NaN was the best loss so far, nothing was ever better, and early stopping ended the run as finished."""
    model = poisoned_model(tmp_path / "model", 300)
    tokens = VALIDATION.tokens.copy()
    tokens[VALIDATION.offsets[1]] = 300
    poisoned = EncodedRecords(**{**VALIDATION.__dict__, "tokens": tokens})
    sections: dict[str, Any] = {"devices": devices, "method": "lora", "eval": {"every_steps": 2}}
    ranks = run(tmp_path / "run", model, TRAIN, poisoned, **sections)
    assert ranks.wait() == [1] * devices
    for log in ranks.logs:
        assert "step 2: the validation loss is nan; lower train.learning_rate" in log.read_text()
    assert not ranks.folder.result.exists()
    assert not (ranks.folder.checkpoints / "best.json").exists()


def test_patience_and_the_best_loss_survive_a_stop(model: Path, tmp_path: Path) -> None:
    """A resumed run counted its evaluations anew, or took a worse checkpoint for the best."""
    sections: dict[str, Any] = {
        "method": {"name": "full"},
        "train": {"global_batch_size": 4, "learning_rate": 0.02, "epochs": 50.0},
        "eval": {"every_steps": 1, "early_stop_patience": 4},
    }
    whole = start(make_run(tmp_path / "whole", model, TRAIN, VALIDATION, **sections)).finish()
    result = whole.read_json("result.json")
    stop_at = (result["best_step"] + 1, 0)  # two evaluations after the best one
    folder = make_run(tmp_path / "run", model, TRAIN, VALIDATION, **sections)
    assert start(folder, before=observe, path=str(tmp_path), stop_at=stop_at).wait() == [143]
    start(folder).finish()
    resumed = folder.read_json("result.json")
    for key in ("ending", "steps", "best_step", "eval_loss"):
        assert (
            resumed[key] == pytest.approx(result[key]) if key == "eval_loss" else resumed[key] == result[key]
        )
    assert (folder.checkpoints / "best.json").read_bytes() == (whole.checkpoints / "best.json").read_bytes()
