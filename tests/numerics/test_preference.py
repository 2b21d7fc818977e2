"""Losses of pairs of answers in float64, against their formulas written out."""

from __future__ import annotations

import math

import pytest
import torch

from leantune.ops.preference import bradley_terry_loss, dpo_margins, sequence_log_probs

torch.manual_seed(0)
POLICY = -20 * torch.rand(6, 2, dtype=torch.float64)
REFERENCE = -20 * torch.rand(6, 2, dtype=torch.float64)


@pytest.mark.parametrize("beta", [0.1, 0.5, 3.0])
def test_dpo_is_equation_7(beta: float) -> None:
    """The ratio of policy and reference was taken the other way round, or beta was left out."""
    losses = bradley_terry_loss(dpo_margins(POLICY, REFERENCE, beta))
    for pair in range(6):
        (chosen, rejected), (ref_chosen, ref_rejected) = POLICY[pair].tolist(), REFERENCE[pair].tolist()
        inside = beta * (chosen - ref_chosen) - beta * (rejected - ref_rejected)
        expected = -math.log(1 / (1 + math.exp(-inside)))
        assert losses[pair].item() == pytest.approx(expected, rel=1e-12)


def test_the_gradient_of_dpo_is_that_of_the_paper() -> None:
    """-beta σ(r_rejected - r_chosen) for the chosen and + for the rejected answer (section 4)."""
    policy = POLICY.clone().requires_grad_()
    bradley_terry_loss(dpo_margins(policy, REFERENCE, 0.3)).sum().backward()
    rewards = 0.3 * (POLICY - REFERENCE)
    weight = torch.sigmoid(rewards[:, 1] - rewards[:, 0])
    expected = torch.stack([-0.3 * weight, 0.3 * weight], dim=1)
    torch.testing.assert_close(policy.grad, expected, rtol=1e-12, atol=0)


def test_equal_models_give_ln_2_and_large_margins_stay_finite() -> None:
    equal = bradley_terry_loss(dpo_margins(POLICY, POLICY, 0.1))
    assert torch.equal(equal, torch.full_like(equal, math.log(2)))
    far = bradley_terry_loss(torch.tensor([1e4, -1e4], dtype=torch.float64))
    assert far.tolist() == [0.0, 1e4]


def test_log_probabilities_are_summed_by_sequence() -> None:
    """A token counted for the neighbouring sequence; a mean instead of a sum; labels without softmax."""
    logits = torch.randn(7, 11, dtype=torch.float64)
    labels, sequence = torch.randint(11, (7,)), torch.tensor([0, 0, 2, 2, 2, 3, 0])
    found = sequence_log_probs(logits, labels, sequence, 4)
    expected = [0.0] * 4
    for row in range(7):
        norm = sum(math.exp(value) for value in logits[row].tolist())
        expected[int(sequence[row])] += math.log(math.exp(logits[row, labels[row]].item()) / norm)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert sequence_log_probs(logits.bfloat16(), labels, sequence, 4).dtype == torch.float32
