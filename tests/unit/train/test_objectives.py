"""Objectives on a tiny model: sums against formulas, the reference, gradients that do not know splits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leantune.data.batches import MicroBatch, collate
from leantune.data.encode import with_facts
from leantune.data.records import DataFacts, EncodedRecords
from leantune.errors import ModelError
from leantune.methods import Attached, attach, join
from leantune.methods.head import AttachedHead, head_of
from leantune.methods.head import attach as attach_head
from leantune.models.precision import PRECISIONS
from leantune.train.objectives import Classification, Dpo, NextToken, Objective, Reward, objective_of
from leantune.train.validation import mean_loss
from tests.batches import shake
from tests.models import tiny_model

FP32 = PRECISIONS["fp32"]
LABELS = ("no", "maybe", "yes")
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4},
    "dora": {"rank": 4},
    "loreft": {"rank": 2, "position": "f2+l2"},
    "together": {"parts": [{"name": "lora", "rank": 4}, {"name": "loreft", "rank": 2}]},
}


def records(pairs: bool, count: int = 6, seed: int = 0) -> EncodedRecords:
    """Records of uneven lengths: pairs of answers, or texts with classes."""
    generator = np.random.default_rng(seed)
    many = 2 if pairs else 1
    prompts = np.repeat(generator.integers(3, 9, count), many)
    lengths = prompts + (generator.integers(1, 7, count * many) if pairs else 0)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    supervised = np.concatenate([np.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)])
    facts = DataFacts("test", "test", "plain", count, count, 0, labels=[] if pairs else list(LABELS))
    return with_facts(
        EncodedRecords(
            tokens=generator.integers(3, 320, offsets[-1], dtype=np.int32),
            supervised=supervised,
            offsets=offsets,
            prompt_lengths=prompts,
            sample_ids=np.arange(count),
            facts=facts,
            targets=None if pairs else np.arange(count) % 3,
        )
    )


PAIRS, TEXTS = records(pairs=True), records(pairs=False)


def prepared(method: str, objective: Objective, *, moved: bool = True) -> Attached:
    """A method, and the head of the objective, on a tiny model."""
    attached = attach(method, tiny_model(), METHODS[method], seed=0)
    if not isinstance(objective, Dpo):
        labels = LABELS if isinstance(objective, Classification) else None
        attached = join([*attached.parts(), attach_head(attached.model, seed=0, labels=labels)])
    if moved:
        shake(attached)
    attached.model.train()
    return attached


def states(attached: Attached, batch: MicroBatch, row: int) -> Tensor:
    """The final states of one sequence by itself, computed by transformers: [T, d]."""
    length = int(batch.lengths[row])
    with attached.edits(batch.prompt_lengths[row : row + 1]):
        out = attached.model(input_ids=batch.input_ids[row : row + 1, :length], output_hidden_states=True)
    return out.hidden_states[-1][0]


def log_probability(model: Any, batch: MicroBatch, row: int) -> float:
    """Of the answer of one sequence by itself."""
    prompt, length = int(batch.prompt_lengths[row]), int(batch.lengths[row])
    ids = batch.input_ids[row, :length]
    log_probs = model(input_ids=ids[None]).logits[0].double().log_softmax(dim=-1)
    return sum(float(log_probs[t - 1, ids[t]]) for t in range(prompt, length))


def sums_of(objective: Objective, attached: Attached, batch: MicroBatch) -> tuple[float, ...]:
    with torch.no_grad(), objective.sums(attached, batch, FP32) as sums:
        return (float(sums.loss), *(float(value) for value in sums.measures))


@pytest.mark.parametrize("method", METHODS)
def test_dpo_compares_with_the_model_without_edits(method: str) -> None:
    """The reference was edited too (loss ln 2 for ever), or the policy was not."""
    attached, batch = prepared(method, Dpo(0.3)), collate(PAIRS, range(6), 0)
    loss, right, margin = sums_of(Dpo(0.3), attached, batch)
    plain = tiny_model()
    with torch.no_grad():
        reference = [log_probability(plain, batch, row) for row in range(12)]
        policy = list[float]()
        for row in range(12):
            with attached.edits(batch.prompt_lengths[row : row + 1]):
                policy.append(log_probability(attached.model, batch, row))
    gains = [0.3 * (mine - theirs) for mine, theirs in zip(policy, reference, strict=True)]
    margins = [gains[i] - gains[i + 1] for i in range(0, 12, 2)]
    assert max(map(abs, margins)) > 1e-3
    assert loss == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins), rel=1e-5)
    assert margin == pytest.approx(sum(margins), abs=1e-4)
    assert right == sum(m > 0 for m in margins)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_fresh_adapter_gives_exactly_ln_2(method: str) -> None:
    """Policy and reference went through other kernels, other padding, or dropout."""
    settings = {**METHODS[method], "dropout": 0.5}
    attached = attach(method, tiny_model(), settings, seed=0)
    attached.model.train()
    loss, _, margin = sums_of(Dpo(), attached, collate(PAIRS, [2], 0))
    assert (loss, margin) == (float(torch.tensor(2.0).log()), 0.0)


def test_the_reference_leaves_the_mode_of_the_model_and_its_random_numbers_alone() -> None:
    attached = prepared("lora", Dpo())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    Dpo().reference(attached, collate(PAIRS, [0], 0), FP32)
    assert attached.model.training
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("method", METHODS)
def test_classes_are_read_at_the_last_token(method: str) -> None:
    """The head read the padding, the first token, or states before the final norm."""
    attached, batch = prepared(method, Classification()), collate(TEXTS, range(6), 0)
    head = head_of(attached)
    assert head is not None
    expected, right = 0.0, 0
    with torch.no_grad():
        loss, accurate = sums_of(Classification(), attached, batch)
        for row in range(6):
            logits = states(attached, batch, row)[-1].double() @ head.module.weight.double().t()
            logits = logits + (0 if head.module.bias is None else head.module.bias.double())
            expected -= float(logits.log_softmax(dim=0)[row % 3])
            right += int(logits.argmax()) == row % 3
    assert loss == pytest.approx(expected, rel=1e-5)
    assert accurate == right


def test_rewards_are_read_at_the_last_token_of_each_answer() -> None:
    attached, batch = prepared("together", Reward()), collate(PAIRS, range(6), 0)
    head = head_of(attached)
    assert head is not None
    assert head.module.bias is None, "a bias cancels in every difference, and would drift with weight decay"
    with torch.no_grad():
        loss, right, margin = sums_of(Reward(), attached, batch)
        rewards = [float(states(attached, batch, row)[-1] @ head.module.weight[0]) for row in range(12)]
    margins = [rewards[i] - rewards[i + 1] for i in range(0, 12, 2)]
    assert loss == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins), rel=1e-5)
    assert (right, margin) == (sum(m > 0 for m in margins), pytest.approx(sum(margins), abs=1e-4))


OBJECTIVES: dict[str, tuple[Objective, EncodedRecords]] = {
    "classification": (Classification(), TEXTS),
    "dpo": (Dpo(), PAIRS),
    "reward": (Reward(), PAIRS),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_do_not_know_how_a_window_was_split(name: str, recompute: bool) -> None:
    """A mean over each micro-batch weighed pairs of a small one more; recomputed blocks were not edited."""
    from leantune.models.recompute import recompute_blocks

    objective, data = OBJECTIVES[name]
    attached = prepared("together", objective)

    def gradients(chunks: list[range]) -> dict[str, Tensor]:
        attached.model.zero_grad(set_to_none=True)
        for chunk in chunks:
            with objective.sums(attached, collate(data, chunk, 0), FP32) as sums:
                (sums.loss / 6).backward()
        return {n: p.grad.clone() for n, p in attached.trainable().items() if p.grad is not None}

    whole = gradients([range(6)])
    assert whole.keys() == attached.trainable().keys()
    if recompute:
        recompute_blocks(attached.model, 1, False)
    parts = gradients([range(1), range(1, 4), range(4, 6)])
    for key, gradient in whole.items():
        torch.testing.assert_close(parts[key], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_validation_gives_means_over_its_units(name: str) -> None:
    objective, data = OBJECTIVES[name]
    attached = prepared("lora", objective)
    options: dict[str, Any] = {"device": torch.device("cpu"), "pad_id": 0, "precision": FP32}
    means = mean_loss(attached, objective, data, micro_batch_size=4, **options)
    loss, *measures = sums_of(objective, attached, collate(data, range(6), 0))
    assert means.units == 6
    assert means.loss == pytest.approx(loss / 6, rel=1e-5)
    assert list(means.measures) == list(objective.measures)
    assert list(means.measures.values()) == pytest.approx([m / 6 for m in measures], abs=1e-5)
    assert attached.model.training


def test_a_head_is_fp32_seeded_and_its_own() -> None:
    """The head differed between ranks, went to 16 bits, or was counted among the adapter's parameters."""
    first, again = (prepared("lora", Classification(), moved=False) for _ in range(2))
    one, two = head_of(first), head_of(again)
    assert isinstance(one, AttachedHead)
    assert isinstance(two, AttachedHead)
    assert torch.equal(one.module.weight, two.module.weight)
    assert first.pinned() == one.own() == {"task_head.weight", "task_head.bias"}
    assert "task_head.bias" in first.decay_free()
    assert one.module(torch.randn(2, 32).bfloat16()).dtype == torch.float32
    assert "task_head.weight" in first.trainable()
    assert first.frozen_blocks() == 0
    assert prepared("loreft", Reward()).describe()[-1] == "trained head: 1 × 32 (reward)"


def test_without_a_head_there_is_nothing_to_classify_by() -> None:
    attached = attach("lora", tiny_model(), {}, seed=0)
    with pytest.raises(
        ModelError, match="no trained head; train one with objective: classification or reward"
    ):
        sums_of(Classification(), attached, collate(TEXTS, [0], 0))


def test_the_objective_of_an_adapter_without_a_run_is_what_its_head_is_for() -> None:
    assert isinstance(objective_of(None, prepared("lora", Classification())), Classification)
    assert isinstance(objective_of(None, prepared("lora", Reward())), Reward)
    assert isinstance(objective_of(None, attach("lora", tiny_model(), {}, seed=0)), NextToken)
