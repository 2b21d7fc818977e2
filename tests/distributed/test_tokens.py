"""One step against plain mathematics: the sum of token losses over all supervised tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from leantune.data.records import EncodedRecords
from tests.distributed.ranks import make_records, make_run, run, samples, spy, start, steps, weights


def reference(
    model: Path, records: EncodedRecords, indices: list[int]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and weights after one step of plain SGD with rate 1, from logits of one record at a time."""
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, count = torch.zeros(()), 0
    for index in indices:
        record = records[index]
        ids = torch.from_numpy(record.tokens.astype("int64"))[None]
        logits = network(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1]
        answers = torch.from_numpy(record.supervised[1:].copy())
        total = total + F.cross_entropy(logits[answers], ids[0, 1:][answers], reduction="sum")
        count += int(answers.sum())
    loss = total / count
    loss.backward()
    return float(loss.detach()), {name: (p - p.grad).detach() for name, p in network.named_parameters()}


@pytest.mark.parametrize(
    ("devices", "answers", "micro_batch_size"),
    [(1, [1, 5, 20], 1), (2, [2, 50], 1), (2, [1, 5, 20], 1), (2, [1, 1, 1, 30, 2], 2)],
)
def test_one_step_is_the_mean_over_all_supervised_tokens(
    devices: int, answers: list[int], micro_batch_size: int, model: Path, tmp_path: Path
) -> None:
    """A mean of means weighs a micro-batch or a rank with few supervised tokens too much."""
    records = make_records(answers)
    train = {
        "optimizer": {"name": "sgd"},
        "learning_rate": 1.0,
        "micro_batch_size": micro_batch_size,
        "global_batch_size": 8 * micro_batch_size,
    }
    ranks = run(tmp_path / "run", model, records, devices=devices, method="full", train=train)
    loss, expected = reference(model, records, list(range(len(answers))))
    folder = ranks.finish()
    assert [row["supervised_tokens"] for row in steps(folder)] == [sum(answers)]
    assert steps(folder)[0]["loss"] == pytest.approx(loss, rel=1e-6)
    trained = weights(folder)
    moved = {name: torch.from_numpy(trained[name]) for name in expected}
    for name, value in expected.items():
        torch.testing.assert_close(moved[name], value, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    ("num_records", "devices", "accumulation", "expected"),
    [
        (5, 2, 1, [4, 1]),  # the last window leaves rank 1 without a record
        (1, 2, 1, [1]),  # fewer records than ranks
        (14, 1, 4, [8, 6]),  # 7 micro-batches, accumulation 4
        (14, 2, 4, [14]),  # rank 0 has 4 of them, rank 1 has 3
    ],
)
def test_the_tail_is_used_with_its_true_count(
    num_records: int, devices: int, accumulation: int, expected: list[int], model: Path, tmp_path: Path
) -> None:
    """A short last window was dropped, padded by repetition, divided by a full count, or hung a rank."""
    answers = [1 + (5 * i) % 13 for i in range(num_records)]
    records = make_records(answers)
    train = {"gradient_accumulation_steps": accumulation, "epochs": 2.0}
    folder = make_run(tmp_path / "run", model, records, devices=devices, method="lora", train=train)
    start(folder, before=spy, path=str(tmp_path)).finish()
    seen = samples(tmp_path)
    rows = steps(folder)
    assert len(rows) == 2 * len(expected)
    epochs = [seen[: len(expected)], seen[len(expected) :]]
    for epoch in epochs:
        assert sorted(map(len, epoch), reverse=True) == expected
        assert sorted(i for window in epoch for i in window) == list(range(num_records))
    assert [row["supervised_tokens"] for row in rows] == [sum(answers[i] for i in w) for w in seen]
