"""The prompts that forward passes inside one `edits` context work on, and which tokens are edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from leantune.config.positions import Positions
from leantune.errors import ModelError
from leantune.ops.positions import Tokens, at_indices, first_and_last, join, spans

Generation = Literal["prompt", "all", "new"]


class EditOptions(TypedDict, total=False):
    """What a caller may say about the P prompts of a batch, besides their lengths and starts.

    rows: int64 [P], the row of the batch that each lies in (rows that hold several records); ends: int64
    [P], the column after the last token of each record; marked: bool [B, T], tokens inside markers;
    subspaces: bool [P, r], dimensions that act; strength: a factor for all, or [P]; generation: which tokens
    are edited; acting: bool [P], prompts that this adapter acts on; adapters: of several adapters, the name
    of each prompt's, None for the base model.
    """

    rows: Tensor
    ends: Tensor
    marked: Tensor
    subspaces: Tensor
    strength: float | Tensor
    generation: Generation
    acting: Tensor
    adapters: Sequence[str | None]


@dataclass
class Prompts:
    """Prompts of a batch. Positions are worked out once for each width of the batch and kept."""

    lengths: Tensor
    starts: Tensor
    options: EditOptions
    decoding: bool = False  # a filled KV cache: the prompts went through the model before
    shape: tuple[int, int] | None = None  # of the batch that is in the model
    _found: dict[Any, Tokens] = field(default_factory=dict[Any, Tokens])

    @property
    def widest(self) -> int:
        """The column after the last token of any prompt."""
        return int((self.starts + self.lengths).max()) if len(self.lengths) else 0

    def enter(self, batch: int, width: int, decoding: bool) -> None:
        """A batch of this shape comes into the model; raises `ModelError` if it cannot hold these prompts."""
        # Without a cache that tells, one token behind longer prompts can only be a new one.
        self.decoding = decoding or (width == 1 < self.widest)
        if not self.decoding and width < self.widest:
            raise ModelError(
                f"the input is {width} tokens wide, but `edits` was told of prompts that reach token "
                f"{self.widest}; give the lengths (and starts) of the prompts in this batch"
            )
        if "rows" not in self.options and batch % len(self.lengths):
            raise ModelError(f"a batch of {batch} sequences does not belong to {len(self.lengths)} prompts")
        self.shape = (batch, width)

    def tokens(
        self,
        positions: Positions,
        part: str,
        takes_new: bool,
        generation: str,
        shift: int,
        device: torch.device,
    ) -> Tokens:
        """The tokens of the batch that an intervention edits.

        part: both, first or last; takes_new: it also edits what comes after the prompt, if `generation`
        says so; shift: tokens at the end of each prompt that do not count.
        """
        key = (self.shape, self.decoding, positions, part, takes_new, generation, shift, device)
        if key not in self._found:
            found = self._work_out(positions, part, takes_new, generation, shift)
            acting = self.options.get("acting")
            found = found if acting is None else found.of(self._of_prompts(acting))
            self._found[key] = found.to(device)
        return self._found[key]

    def per_token(self, values_P: Tensor, tokens: Tokens) -> Tensor:
        """The value of each token's prompt."""
        return self._of_prompts(values_P).to(tokens.prompts.device)[tokens.prompts]

    def _work_out(
        self, positions: Positions, part: str, takes_new: bool, generation: str, shift: int
    ) -> Tokens:
        assert self.shape is not None
        batch, width = self.shape
        lengths, starts = self._of_prompts(self.lengths), self._of_prompts(self.starts)
        rows = self.options.get("rows")
        rows = torch.arange(batch, device=lengths.device) if rows is None else rows
        if self.decoding:
            everything = spans(rows * width, torch.full_like(rows, width))
            return everything if takes_new and generation != "prompt" else _none(everything)
        begins = rows * width + starts
        found: list[Tokens] = []
        if generation != "new":
            found.append(self._in_prompts(positions, part, begins, (lengths - shift).clamp(min=0)))
        if takes_new and generation != "prompt":
            ends = self.options.get("ends")
            after = width - starts - lengths if ends is None else self._of_prompts(ends) - starts - lengths
            found.append(spans(begins + lengths, after))
        return join(found) if found else _none(spans(begins, lengths))

    def _in_prompts(self, positions: Positions, part: str, begins: Tensor, lengths: Tensor) -> Tokens:
        if positions.markers:
            return self._in_markers(begins, lengths)
        if positions.every:
            return spans(begins, lengths)
        if positions.indices:
            return at_indices(begins, lengths, positions.indices)
        first, last = first_and_last(begins, lengths, positions.first, positions.last)
        return {"first": first, "last": last}.get(part) or join([first, last])

    def _in_markers(self, begins: Tensor, lengths: Tensor) -> Tokens:
        assert self.shape is not None
        everything = spans(begins, lengths)
        marked = self.options.get("marked")
        if marked is None:
            raise ModelError(
                "method.position is markers, but `edits` was not told which tokens are marked; give "
                "`marked`, bool [B, T]"
            )
        repeats = self.shape[0] // len(marked)
        flat = marked.repeat_interleave(repeats, dim=0) if repeats > 1 else marked
        padded = torch.zeros(self.shape, dtype=torch.bool, device=marked.device)
        padded[:, : flat.shape[1]] = flat
        kept = padded.flatten().to(everything.flat.device)[everything.flat]
        return Tokens(everything.flat[kept], everything.prompts[kept])

    def _of_prompts(self, values_P: Tensor) -> Tensor:
        """Beams of one prompt are neighbours in the batch: each has its prompt's value."""
        assert self.shape is not None
        if "rows" in self.options:
            return values_P
        return values_P.repeat_interleave(self.shape[0] // len(values_P), dim=0)


def _none(tokens: Tokens) -> Tokens:
    return Tokens(tokens.flat[:0], tokens.prompts[:0])
