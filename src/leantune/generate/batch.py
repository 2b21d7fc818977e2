"""Decoding rows of one batch that differ in everything: adapter, sampling, where they end.

B rows, T columns of the padded prompts, V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from leantune.generate.decode import evaluating
from leantune.generate.draw import draw
from leantune.generate.edits import edit_options
from leantune.generate.pieces import TextPieces
from leantune.generate.prompts import PromptBatch, left_pad, pad_id
from leantune.generate.rows import Finish, Piece, Row
from leantune.methods.choice import AdapterSet
from leantune.methods.protocol import Attached


def decode_rows(
    model: Any, tokenizer: Any, rows: Sequence[Row], attached: Attached, emit: Callable[[Piece], None]
) -> None:
    """Answer all rows together; `emit` gets each piece of text as soon as it is certain.

    A row with a seed draws the same tokens in any batch. Rows that have ended leave the batch whenever
    half of it is done with.
    """
    device = model.get_input_embeddings().weight.device
    marked = [row.marked for row in rows]
    batch = left_pad([row.tokens for row in rows], pad_id(model, tokenizer), device, marked)
    passes = _Passes(model, batch, max(row.sampling.max_new_tokens for row in rows))
    answers = [_Answer(index, row, tokenizer, device) for index, row in enumerate(rows)]
    tokens_BT = batch.tokens
    with evaluating(model):
        while answers:
            with _edits(attached, passes, [answer.row for answer in answers]):
                tokens_BT = _until_half_ended(passes, tokens_BT, answers, emit)
            live = [i for i, answer in enumerate(answers) if answer.finish is None]
            if live:
                passes.keep(live)
            tokens_BT, answers = tokens_BT[live], [answers[i] for i in live]


def _edits(attached: Attached, passes: _Passes, rows: Sequence[Row]) -> AbstractContextManager[None]:
    """The edits of these rows; with prompts in the cache, those of new tokens."""
    options = edit_options(rows, passes.lengths.device)
    if isinstance(attached, AdapterSet):
        options["adapters"] = [row.adapter for row in rows]
    return attached.edits(passes.lengths, passes.starts, marked=passes.marked, **options)


def _until_half_ended(
    passes: _Passes, tokens_BT: Tensor, answers: Sequence[_Answer], emit: Callable[[Piece], None]
) -> Tensor:
    """Decode on; returns the tokens [B, 1] that go into the next pass."""
    while True:
        chosen = _choose(passes.next(tokens_BT), answers)
        for answer, token in zip(answers, chosen, strict=True):
            if answer.finish is None and (piece := answer.take(token)) is not None:
                emit(piece)
        tokens_BT = torch.tensor(chosen, device=tokens_BT.device)[:, None]
        if 2 * sum(answer.finish is None for answer in answers) <= len(answers):
            return tokens_BT


def _choose(logits_BV: Tensor, answers: Sequence[_Answer]) -> list[int]:
    """The next token of every row: the likeliest, or one that is drawn."""
    tokens: list[int] = logits_BV.argmax(-1).tolist()
    for index, answer in enumerate(answers):
        if answer.finish is None and answer.row.sampling.samples:
            tokens[index] = draw(logits_BV[index], answer.row.sampling, answer.generator)
    return tokens


class _Answer:
    """How far the answer of one row has come."""

    def __init__(self, index: int, row: Row, tokenizer: Any, device: torch.device) -> None:
        self.row = row
        self.finish: Finish | None = None
        self.generator = torch.Generator(device)
        if row.sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(row.sampling.seed)
        self._index = index
        self._pieces = TextPieces(tokenizer, row.stop_token_ids, row.stop_strings)

    def take(self, token: int) -> Piece | None:
        """What the next token adds; None if no text is certain yet."""
        text = self._pieces.put(token)
        count = len(self._pieces.tokens)
        if self.row.cancelled:
            self.finish = "cancelled"
        elif self._pieces.stopped:
            self.finish = "stop"
        elif count == self.row.sampling.max_new_tokens:
            self.finish = "length"
        if self.finish is not None:
            text += self._pieces.end()
        return Piece(self._index, text, count, self.finish) if text or self.finish else None


class _Passes:
    """Forward passes that go on from each other through the model's cache."""

    def __init__(self, model: Any, batch: PromptBatch, max_new_tokens: int) -> None:
        accepted = inspect.signature(model.forward).parameters
        self.lengths, self.starts, self.marked = batch.lengths, batch.starts, batch.marked
        self._model = model
        # transformers renamed it; a model makes the kind of cache that its layers need by itself.
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._cache: Any = None
        self._options = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in accepted else {})
        self._mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch.mask), max_new_tokens)], dim=1)
        self._takes_positions = "position_ids" in accepted
        self._seen = 0

    def next(self, tokens_BT: Tensor) -> Tensor:
        """Logits of the token after these, fp32 [B, V]."""
        begin, self._seen = self._seen, self._seen + tokens_BT.shape[1]
        options: dict[str, Any] = {**self._options, self._cache_name: self._cache}
        if self._takes_positions:
            options["position_ids"] = (self._mask.cumsum(1) - 1).clamp(min=0)[:, begin : self._seen]
        output = self._model(input_ids=tokens_BT, attention_mask=self._mask[:, : self._seen], **options)
        self._cache = output[self._cache_name]
        return output.logits[:, -1].float()

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch alone."""
        index = torch.tensor(rows, device=self._mask.device)
        self._cache.batch_select_indices(index)
        self.lengths, self.starts, self._mask = self.lengths[index], self.starts[index], self._mask[index]
        self.marked = self.marked[index]
