"""What a micro-batch is learned by: the loss of its tokens, texts or pairs of answers, summed.

The sums of all micro-batches of a window on all ranks are divided by the number of its units: supervised
tokens, records (texts) or pairs. So the gradient is that of the mean loss, however a window was split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leantune.config import objectives as sections
from leantune.data.batches import MicroBatch, Window
from leantune.methods import Attached
from leantune.methods.head import head_of
from leantune.models.precision import Precision
from leantune.ops.loss import summed_cross_entropy
from leantune.ops.preference import bradley_terry_loss, dpo_margins
from leantune.train.forward import answer_log_probs, head_outputs, perplexity, summed_loss


class Sums(NamedTuple):
    """Sums over the units of a micro-batch: of their losses, and of each of the objective's measures."""

    loss: Tensor
    measures: tuple[Tensor, ...] = ()


class Objective(ABC):
    """A loss, its unit, and what validation measures besides it: means of `measures` over the units.

    `records`: the shape of the records that it needs; None: any that have answers.
    """

    unit = "records"
    records: str | None = None
    measures: tuple[str, ...] = ()

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all that `validation.mean_loss` gives."""
        return ("loss", *self.measures)

    @contextmanager
    def sums(
        self,
        attached: Attached,
        batch: MicroBatch,
        precision: Precision,
        edit_options: Mapping[str, Any] | None = None,
    ) -> Generator[Sums]:
        """The sums of a micro-batch. The loss goes backward inside this context, where blocks that are
        computed again are edited as before. `edit_options` are told to `Attached.edits` besides the batch's.
        """
        reference = self.reference(attached, batch, precision)
        with attached.edits(batch.prompt_lengths, **{**batch.edit_options, **(edit_options or {})}):
            yield self.edited(attached, batch, precision, reference)

    def units(self, window: Window) -> int:
        """How many losses the window has on all ranks."""
        return window.num_records

    def summaries(self, loss: float) -> dict[str, float]:
        """What follows from the mean loss alone."""
        del loss
        return {}

    def reference(self, attached: Attached, batch: MicroBatch, precision: Precision) -> Tensor | None:
        """What is computed before, without edits."""
        del attached, batch, precision

    @abstractmethod
    def edited(
        self, attached: Attached, batch: MicroBatch, precision: Precision, reference: Tensor | None
    ) -> Sums:
        """The sums, inside `Attached.edits`."""


class NextToken(Objective):
    """The cross-entropy of the supervised tokens; with `loss_chunk_tokens` so many at a time."""

    unit = "supervised_tokens"

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "perplexity")

    def __init__(self, loss_chunk_tokens: int | None = None) -> None:
        self.loss_chunk_tokens = loss_chunk_tokens

    def units(self, window: Window) -> int:
        return window.supervised_tokens

    def summaries(self, loss: float) -> dict[str, float]:
        return {"perplexity": perplexity(loss)}

    def edited(
        self, attached: Attached, batch: MicroBatch, precision: Precision, reference: Tensor | None
    ) -> Sums:
        return Sums(summed_loss(attached.model, batch, precision, self.loss_chunk_tokens))


class Classification(Objective):
    """The cross-entropy of the class of each text, read at its last token."""

    records = "classification"
    measures = ("accuracy",)

    def edited(
        self, attached: Attached, batch: MicroBatch, precision: Precision, reference: Tensor | None
    ) -> Sums:
        logits, targets = head_outputs(attached, batch, precision), batch.targets
        assert targets is not None
        right = (logits.argmax(dim=1) == targets).sum()
        return Sums(summed_cross_entropy(logits, targets), (right,))


class Dpo(Objective):
    """Direct Preference Optimization (arXiv 2305.18290): the reference is the model without its adapter."""

    unit = "pairs"
    records = "preference"
    measures = ("accuracy", "margin")

    def __init__(self, beta: float = 0.1) -> None:
        self.beta = beta

    def reference(self, attached: Attached, batch: MicroBatch, precision: Precision) -> Tensor:
        model = attached.model
        was_training = model.training
        model.eval()  # the reference drops nothing out
        with torch.no_grad(), attached.disabled():
            log_probs = answer_log_probs(model, batch, precision)
        model.train(was_training)
        return log_probs

    def edited(
        self, attached: Attached, batch: MicroBatch, precision: Precision, reference: Tensor | None
    ) -> Sums:
        assert reference is not None
        policy = answer_log_probs(attached.model, batch, precision)
        return _preference_sums(dpo_margins(policy.view(-1, 2), reference.view(-1, 2), self.beta))


class Reward(Objective):
    """A number for each answer, read at its last token; the loss is that of Bradley and Terry."""

    unit = "pairs"
    records = "preference"
    measures = ("accuracy", "margin")

    def edited(
        self, attached: Attached, batch: MicroBatch, precision: Precision, reference: Tensor | None
    ) -> Sums:
        rewards_P2 = head_outputs(attached, batch, precision).view(-1, 2)
        return _preference_sums(rewards_P2[:, 0] - rewards_P2[:, 1])


def _preference_sums(margins_P: Tensor) -> Sums:
    measures = ((margins_P > 0).sum(), margins_P.sum().detach())
    return Sums(bradley_terry_loss(margins_P).sum(), measures)


def objective_of(section: sections.Objective | None, attached: Attached) -> Objective:
    """The objective of something trained: that of its run, or what its head is for."""
    head = head_of(attached)
    if section is not None:
        return build_objective(section)
    if head is None:
        return NextToken()
    return Reward() if head.labels is None else Classification()


def build_objective(section: sections.Objective, loss_chunk_tokens: int | None = None) -> Objective:
    """The objective that a configuration names."""
    match section:
        case sections.ClassificationObjective():
            return Classification()
        case sections.DpoObjective():
            return Dpo(section.beta)
        case sections.RewardObjective():
            return Reward()
        case sections.NextTokenObjective():
            return NextToken(loss_chunk_tokens)
