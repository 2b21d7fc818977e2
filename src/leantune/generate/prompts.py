"""From prompt strings to left-padded token batches, and the tokens at which any answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leantune.data.markers import Markers
from leantune.data.tokens import Encoded, SegmentEncoder
from leantune.errors import DataError


@dataclass(frozen=True)
class PromptBatch:
    """Left-padded prompts.

    tokens: int64 [B, T]; mask: int64 [B, T], 0 on padding; lengths: int64 [B], tokens of each
    prompt; starts: int64 [B], index of its first token; marked: bool [B, T], tokens between markers.
    """

    tokens: Tensor
    mask: Tensor
    lengths: Tensor
    starts: Tensor
    marked: Tensor


def encode_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    max_new_tokens: int,
    markers: tuple[str, str] | None = None,
) -> list[Encoded]:
    """Tokens of all prompts as training has them, with one BOS where the tokenizer puts one.

    `markers`: what stands between them is marked, and they are left out. Raises `DataError` for a prompt
    that is empty or leaves no room to answer, or a marker without a partner.
    """
    limit = max_positions(model)
    encoded = SegmentEncoder(tokenizer).encode_prompts(prompts, Markers(*markers) if markers else None)
    for number, (prompt, (tokens, *_)) in enumerate(zip(prompts, encoded, strict=True), start=1):
        name = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        if not prompt or not tokens:
            raise DataError(f"{name} is empty ({prompt!r}); expected text to continue")
        if limit is not None and len(tokens) >= limit:
            raise DataError(
                f"{name} has {len(tokens)} tokens, but the model has {limit} positions for prompt and "
                f"answer; shorten it: {prompt[:60]!r}"
            )
        if limit is not None and len(tokens) + max_new_tokens > limit:
            raise DataError(
                f"{name} has {len(tokens)} tokens and max_new_tokens is {max_new_tokens}, together more "
                f"than the model's {limit} positions; set max_new_tokens to at most "
                f"{limit - len(tokens)}, or shorten the prompt: {prompt[:60]!r}"
            )
    return encoded


def max_positions(model: Any) -> int | None:
    """Longest sequence the model has positions for, in tokens; None if it names no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def left_pad(
    encoded: Sequence[Sequence[int]],
    pad: int,
    device: torch.device,
    marked: Sequence[Sequence[bool]] = (),
) -> PromptBatch:
    """One batch of prompts that all end at the same column; the mask comes from lengths, not from ids.

    marked: which tokens of each prompt are marked; nothing for one without marks.
    """
    lengths = torch.tensor([len(tokens) for tokens in encoded])
    width = int(lengths.max())
    tokens = torch.tensor([[pad] * (width - len(row)) + list(row) for row in encoded])
    starts = width - lengths
    mask = (torch.arange(width)[None, :] >= starts[:, None]).long()
    marks = torch.zeros(len(encoded), width, dtype=torch.bool)
    for row, flags in enumerate(marked):
        marks[row, width - len(flags) :] = torch.tensor(flags, dtype=torch.bool)
    return PromptBatch(*(tensor.to(device) for tensor in (tokens, mask, lengths, starts, marks)))


def pad_id(model: Any, tokenizer: Any) -> int:
    """A token id to fill padding with; any id that has an embedding row does, as padding is masked."""
    rows = model.get_input_embeddings().weight.shape[0]
    known = tokenizer.pad_token_id
    return known if known is not None and known < rows else 0


def stop_ids(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end any answer: every EOS of the model and of the tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    found = {configured} if isinstance(configured, int) else set(configured or ())
    return (found | {tokenizer.eos_token_id}) - {None}
