"""One loss curve, whatever the number of ranks and the split into micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.ranks import assert_same_curve, assert_same_weights, make_records, run, steps

METHODS: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "lora": {"name": "lora", "rank": 4},
    "loreft": {"name": "loreft", "rank": 4, "position": "f2+l2"},
}
RATES = {"full": 1e-3, "lora": 1e-2, "loreft": 1e-2}
# 37 records do not divide into windows of 8; 1 to 40 supervised tokens.
RECORDS = make_records([1 + (7 * i) % 40 for i in range(37)])


def settings(method: str, micro_batch_size: int = 2, **train: Any) -> dict[str, Any]:
    batches = {"micro_batch_size": micro_batch_size, "global_batch_size": 8, "epochs": 2.0}
    return {
        "method": METHODS[method],
        "output": {"checkpoints": False},
        "train": {**batches, "learning_rate": RATES[method], **train},
    }


@pytest.mark.parametrize("method", METHODS)
def test_ranks_and_splits_give_one_curve(method: str, model: Path, tmp_path: Path) -> None:
    """Gradients were averaged over ranks or micro-batches of unequal token counts, or records dealt anew."""
    splits = [(1, 2), (2, 2), (1, 1), (1, 8), (2, 1), (2, 4)]
    started = [
        run(tmp_path / f"{n}x{micro}", model, RECORDS, devices=n, **settings(method, micro))
        for n, micro in splits
    ]
    reference, *others = [ranks.finish() for ranks in started]
    assert len(steps(reference)) == 10
    assert sum(row["supervised_tokens"] for row in steps(reference)) == 2 * RECORDS.facts.supervised_tokens
    assert sum(row["total_tokens"] for row in steps(reference)) == 2 * RECORDS.facts.total_tokens
    losses = [row["loss"] for row in steps(reference)]
    assert max(losses) - min(losses) > 1e-3, "nothing was learned, so nothing was compared"
    for other in others:
        assert_same_curve(reference, other, rel=1e-5)
        assert_same_weights(reference, other, atol=2e-4)


@pytest.mark.parametrize("method", METHODS)
def test_dropout_clipping_decay_and_schedule_do_not_tell_ranks_apart(
    method: str, model: Path, tmp_path: Path
) -> None:
    """Each rank drew its own dropout, or clipped its own gradient before the sum."""
    choices = settings(
        method,
        max_grad_norm=0.01,
        optimizer={"name": "adamw", "weight_decay": 0.1},
        schedule={"name": "cosine", "warmup_steps": 3},
    )
    if method != "full":
        choices["method"] = {**choices["method"], "dropout": 0.1}
    started = [run(tmp_path / str(n), model, RECORDS, devices=n, **choices) for n in (1, 2)]
    one, two = [ranks.finish() for ranks in started]
    assert_same_curve(one, two, rel=1e-5)
    assert_same_weights(one, two, atol=2e-4)
    assert all(row["grad_norm"] > 0.01 for row in steps(one)), "clipping was never active"
    rates = [row["learning_rate"] for row in steps(one)]
    assert rates[:3] == pytest.approx([RATES[method] * share / 3 for share in (1, 2, 3)])
    assert np.all(np.diff(rates[3:]) < 0)


def test_dropout_is_active_and_follows_the_seed(model: Path, tmp_path: Path) -> None:
    """Equal curves with dropout prove nothing if dropout is off in training."""
    method = {**METHODS["lora"], "dropout": 0.5}
    started = [
        run(tmp_path / "without", model, RECORDS, **settings("lora", max_steps=4)),
        run(tmp_path / "with", model, RECORDS, **{**settings("lora", max_steps=4), "method": method}),
        run(tmp_path / "again", model, RECORDS, **{**settings("lora", max_steps=4), "method": method}),
    ]
    without, dropped, again = [[row["loss"] for row in steps(ranks.finish())] for ranks in started]
    assert dropped == again
    assert without[0] == pytest.approx(dropped[0], rel=1e-6)  # B is zero: the update is still nothing
    assert all(abs(a - b) > 1e-4 for a, b in zip(without[2:], dropped[2:], strict=True))
