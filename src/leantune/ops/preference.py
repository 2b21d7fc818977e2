"""Losses of pairs of answers, and the log-probability of an answer. All in fp32, or the inputs' fp64.

Legend: N labelled positions, V vocabulary, S sequences, P pairs (chosen and rejected).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def sequence_log_probs(logits_NV: Tensor, labels_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """The sum of the log-probabilities of the labels of each sequence, [S].

    labels_N: int64; sequence_N: int64, the sequence that each position belongs to.
    """
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    token_N = -F.cross_entropy(wide_NV, labels_N, reduction="none")
    return token_N.new_zeros(num_sequences).index_add(0, sequence_N, token_N)


def dpo_margins(policy_P2: Tensor, reference_P2: Tensor, beta: float) -> Tensor:
    """How much more the policy than the reference prefers the chosen answers, times beta, [P].

    The columns are the log-probabilities of the chosen and of the rejected answer. It is the difference
    of the implicit rewards of Direct Preference Optimization (arXiv 2305.18290, section 4).
    """
    gain_P2 = policy_P2 - reference_P2
    return beta * (gain_P2[:, 0] - gain_P2[:, 1])


def bradley_terry_loss(margins_P: Tensor) -> Tensor:
    """-log sigmoid of how much better the chosen than the rejected answer of each pair is, [P].

    With `dpo_margins` it is equation 7 of arXiv 2305.18290; with differences of rewards the loss of a reward
    model (arXiv 2203.02155, equation 1).
    """
    return -F.logsigmoid(margins_P)
