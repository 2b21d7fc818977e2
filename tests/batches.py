"""A small right-padded batch, and what the tests do with it again and again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from leantune.data.batches import MicroBatch
from leantune.methods import Attached
from leantune.models.head import labelled_logits
from leantune.ops.loss import summed_cross_entropy

PROMPT_LENGTHS = (6, 9, 3)
LENGTHS = (10, 14, 7)


def small_batch(vocabulary: int = 320, seed: int = 0) -> MicroBatch:
    """Three records; all tokens after the prompt carry loss."""
    width = max(LENGTHS)
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, vocabulary, (len(LENGTHS), width), generator=generator)
    index: list[int] = []
    for row, (prompt, length) in enumerate(zip(PROMPT_LENGTHS, LENGTHS, strict=True)):
        input_ids[row, length:] = 0
        index += [row * width + column - 1 for column in range(prompt, length)]
    label_index = torch.tensor(index)
    labels = input_ids.flatten()[label_index + 1]
    lengths, prompt_lengths = torch.tensor(LENGTHS), torch.tensor(PROMPT_LENGTHS)
    return MicroBatch((0, 1, 2), input_ids, lengths, prompt_lengths, label_index, labels, seed)


@torch.no_grad()
def logits_of(attached: Attached, batch: MicroBatch) -> Tensor:
    """Logits at the labels, in evaluation mode."""
    attached.model.eval()
    with attached.edits(batch.prompt_lengths):
        return labelled_logits(attached.model, batch.input_ids, batch.label_index)


def gradients(attached: Attached, batch: MicroBatch) -> dict[str, Tensor | None]:
    """Gradients of the summed loss by the name of every parameter of the model; training mode."""
    model = attached.model.train()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(batch.seed)
    with attached.edits(batch.prompt_lengths):
        logits = labelled_logits(model, batch.input_ids, batch.label_index)
        summed_cross_entropy(logits, batch.labels).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@torch.no_grad()
def shake(attached: Attached, scale: float = 0.1, seed: int = 1) -> None:
    """Move every trained parameter, as training would, so that nothing is zero or identity any more."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in attached.trainable().values():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    attached.after_step()


@torch.no_grad()
def lively(model: Any, factor: float = 6.0) -> Any:
    """Larger weights, so that a random model's answers depend on its prompt."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(factor)
    return model


def equal_modules(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules hold the same parameters, bit for bit."""
    left, right = dict(a.named_parameters()), dict(b.named_parameters())
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)
