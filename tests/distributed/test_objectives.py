"""Classes, pairs and rewards on several ranks: one curve, one head, and a resumed run that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leantune.data.encode import with_facts
from leantune.data.records import DataFacts, EncodedRecords
from tests.distributed.ranks import (
    assert_same_curve,
    assert_same_weights,
    evaluations,
    make_run,
    move,
    observe,
    run,
    start,
    steps,
    weights,
)

LABELS = ["no", "yes", "maybe"]


def judged(count: int, pairs: bool, seed: int = 0) -> EncodedRecords:
    """Random records whose classes, or better answers, can be told from a token."""
    generator = np.random.default_rng(seed)
    many = 2 if pairs else 1
    targets = np.arange(count) % 3
    sequences = list[np.ndarray]()
    for target in targets:
        prompt = generator.integers(6, 260, generator.integers(3, 9), dtype=np.int32)
        for answer in range(many):
            marked = np.full(
                1 + generator.integers(0, 12), 300 + (answer if pairs else target), dtype=np.int32
            )
            sequences.append(np.concatenate([prompt, marked]))
    lengths = np.array([len(tokens) for tokens in sequences])
    prompts = np.array([int((tokens < 300).sum()) for tokens in sequences])
    learned = np.concatenate([(tokens >= 300) & pairs for tokens in sequences])
    facts = DataFacts("test", "text", "plain", count, count, 0, labels=[] if pairs else LABELS)
    return with_facts(
        EncodedRecords(
            tokens=np.concatenate(sequences),
            supervised=learned,
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            prompt_lengths=prompts if pairs else lengths,
            sample_ids=np.arange(count),
            facts=facts,
            targets=None if pairs else targets,
        )
    )


CASES: dict[str, dict[str, Any]] = {
    "classification": {
        "objective": {"name": "classification", "labels": LABELS},
        "method": [{"name": "lora", "rank": 4}, {"name": "loreft", "rank": 2, "position": "f2+l2"}],
    },
    "dpo": {"objective": "dpo", "method": {"name": "loreft", "rank": 4, "position": "f2+l2"}},
    "reward": {"objective": "reward", "method": {"name": "lora", "rank": 4}},
}
# 21 records do not divide into windows of 8, nor a window of 5 into micro-batches of two ranks.
RECORDS = {name: judged(21, pairs=name != "classification") for name in CASES}
VALIDATION = {name: judged(7, pairs=name != "classification", seed=1) for name in CASES}


def settings(name: str, micro_batch_size: int = 2, **sections: Any) -> dict[str, Any]:
    batches = {"micro_batch_size": micro_batch_size, "global_batch_size": 8, "epochs": 2.0}
    return {**CASES[name], "train": {**batches, "learning_rate": 5e-3}, **sections}


@pytest.mark.parametrize("name", CASES)
def test_ranks_and_strategies_give_one_curve(name: str, model: Path, tmp_path: Path) -> None:
    """The reference pass, or the head, got in the way of sharding; pairs were dealt apart."""
    places: dict[str, Any] = {
        "one": {},
        "ddp": {"devices": 2},
        "fsdp": {"devices": 2, "strategy": {"name": "fsdp", "devices": 2, "adapter": "sharded"}},
        "split": {"micro_batch_size": 4},
    }
    if name == "dpo":
        places["fsdp"]["strategy"] = {"name": "fsdp", "devices": 2, "sharding": "grad_op"}
    started = [
        run(tmp_path / place, model, RECORDS[name], VALIDATION[name], **settings(name, **options))
        for place, options in places.items()
    ]
    reference, *others = [ranks.finish() for ranks in started]
    unit = "records" if name == "classification" else "pairs"
    assert sum(row[unit] for row in steps(reference)) == 2 * 21
    assert evaluations(reference)[-1][f"eval_{unit}"] == 7
    losses = [row["loss"] for row in steps(reference)]
    assert max(losses) - min(losses) > 1e-3, "nothing was learned, so nothing was compared"
    for other in others:
        assert_same_curve(reference, other, rel=1e-5)
        assert_same_weights(reference, other, atol=2e-4)
        for a, b in zip(evaluations(reference), evaluations(other), strict=True):
            assert a["eval_loss"] == pytest.approx(b["eval_loss"], rel=1e-4)
            assert a["eval_accuracy"] == pytest.approx(b["eval_accuracy"])


@pytest.mark.parametrize("name", ["classification", "dpo"])
def test_a_stopped_run_goes_on_with_its_head_on_other_devices(name: str, model: Path, tmp_path: Path) -> None:
    """The head, or its optimizer state, was not in the checkpoint."""
    whole = run(tmp_path / "whole", model, RECORDS[name], **settings(name)).finish()
    folder = make_run(tmp_path / "stopped", model, RECORDS[name], devices=2, **settings(name))
    (tmp_path / "seen").mkdir()
    stopped = start(folder, before=observe, path=str(tmp_path / "seen"), stop_at=(3, 1))
    assert 143 in stopped.wait()
    assert len(steps(folder)) < 6
    finished = start(move(folder, 1)).finish()
    assert_same_curve(whole, finished, rel=1e-5)
    assert_same_weights(whole, finished, atol=2e-4)
    saved = weights(finished)
    if name == "classification":
        assert saved["weight"].shape == (3, 32)
        head = json.loads((finished.adapter / "head_config.json").read_text())
        assert head["labels"] == LABELS


@pytest.mark.parametrize("name", CASES)
def test_a_kept_prefix_changes_nothing(name: str, model: Path, tmp_path: Path) -> None:
    """One of the two passes of DPO, or of the two answers of a pair, was given the states of the other."""
    method = {"name": "loreft", "rank": 2, "position": "f2+l2", "layers": [2]}
    started = []
    for mode in ("off", "memory"):
        sections = settings(name)
        sections = {**sections, "method": method, "train": {**sections["train"], "cache_frozen_prefix": mode}}
        started.append(run(tmp_path / mode, model, RECORDS[name], VALIDATION[name], **sections))
    off, memory = [ranks.finish() for ranks in started]
    assert_same_curve(off, memory, rel=1e-5)
    for a, b in zip(evaluations(off), evaluations(memory), strict=True):
        assert a["eval_loss"] == pytest.approx(b["eval_loss"], rel=1e-5)
