"""Which tokens of a padded batch an intervention edits. Legend: P prompts, T width of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """Tokens of a batch. flat: int64 [n], row * T + column; prompts: int64 [n], the prompt of each."""

    flat: Tensor
    prompts: Tensor

    def of(self, acting_P: Tensor) -> Tokens:
        """Those that belong to the prompts chosen by a mask."""
        kept = acting_P.to(self.prompts.device)[self.prompts]
        return Tokens(self.flat[kept], self.prompts[kept])

    def to(self, device: torch.device) -> Tokens:
        """The same on another device."""
        return Tokens(self.flat.to(device), self.prompts.to(device))


def join(parts: Sequence[Tokens]) -> Tokens:
    """Tokens of several kinds, one after the other."""
    return Tokens(torch.cat([part.flat for part in parts]), torch.cat([part.prompts for part in parts]))


def first_and_last(begins_P: Tensor, lengths_P: Tensor, first: int, last: int) -> tuple[Tokens, Tokens]:
    """The first and the last tokens of each prompt, which begins at the flat index begins_P.

    A prompt of L tokens gives min(L // 2, first) first and min(L // 2, last) last ones, so
    that no token is edited twice.
    """
    half = lengths_P // 2
    first_P, last_P = half.clamp(max=first), half.clamp(max=last)
    return spans(begins_P, first_P), spans(begins_P + lengths_P - last_P, last_P)


def at_indices(begins_P: Tensor, lengths_P: Tensor, indices: Sequence[int]) -> Tokens:
    """Single tokens of each prompt; a negative index counts from its end.

    An index that a prompt does not have gives nothing, and two that mean the same token give it once.
    """
    asked = torch.tensor(indices, device=lengths_P.device)
    columns = torch.where(asked < 0, lengths_P[:, None] + asked, asked.expand(len(lengths_P), -1))
    there = (columns >= 0) & (columns < lengths_P[:, None])
    same = columns[:, :, None] == columns[:, None, :]
    repeated = torch.tril(same, diagonal=-1).any(dim=2)
    prompts, which = torch.nonzero(there & ~repeated, as_tuple=True)
    return Tokens(begins_P[prompts] + columns[prompts, which], prompts)


def spans(begins_P: Tensor, counts_P: Tensor) -> Tokens:
    """The tokens begins[p], ..., begins[p] + counts[p] - 1 of all prompts p."""
    offsets = torch.arange(int(counts_P.max()) if len(counts_P) else 0, device=begins_P.device)
    inside = offsets < counts_P[:, None]
    return Tokens((begins_P[:, None] + offsets)[inside], torch.nonzero(inside)[:, 0])
