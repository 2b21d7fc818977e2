"""Which tokens of a padded batch an intervention edits. Legend: B prompts, T width of the batch."""

from __future__ import annotations

import torch
from torch import Tensor


def edited_positions(
    prompt_lengths_B: Tensor, prompt_starts_B: Tensor, width: int, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """Flat indices (row * width + column) of the first and of the last prompt tokens to edit.

    A prompt of L tokens gives min(L // 2, first) first and min(L // 2, last) last ones, so
    that no token is edited twice. prompt_starts_B is the padding to the left of each prompt.
    """
    half = prompt_lengths_B // 2
    rows = torch.arange(len(prompt_lengths_B), device=prompt_lengths_B.device) * width + prompt_starts_B
    first_B, last_B = half.clamp(max=first), half.clamp(max=last)
    return _spans(rows, first_B), _spans(rows + prompt_lengths_B - last_B, last_B)


def _spans(starts_B: Tensor, counts_B: Tensor) -> Tensor:
    """The numbers starts[i], ..., starts[i] + counts[i] - 1 of all i, one after the other."""
    offsets = torch.arange(int(counts_B.max()) if len(counts_B) else 0, device=starts_B.device)
    return (starts_B[:, None] + offsets)[offsets < counts_B[:, None]]
