"""The frozen prefix in a run: its output is computed once for each micro-batch and taken from a store later.

The blocks below the lowest trained one compute the same in every epoch. A micro-batch that is in the store
whole skips them; any other one is computed as usual, and put there. Nothing is rounded or cut: where
micro-batches stay the same from epoch to epoch (`train.reshuffle: windows`) losses are equal to the bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from leantune.data.batches import MicroBatch
from leantune.models.prefix import FrozenPrefix
from leantune.train.prefix_store import Store


class PrefixCache:
    """The contexts in which micro-batches go through the model; without a prefix and a store they do nothing.

    `whole`: micro-batches are the same in every epoch and are kept as they are, padding included; else each
    sequence is kept by itself, [length, d], and put together anew with zeros for padding.
    """

    def __init__(
        self, prefix: FrozenPrefix | None = None, store: Store | None = None, whole: bool = True
    ) -> None:
        self._prefix = prefix
        self._store = store
        self._whole = whole

    @contextmanager
    def training(self, batch: MicroBatch) -> Generator[None]:
        """Forward passes of a micro-batch of the training records."""
        with self._passes("train", batch):
            yield

    @contextmanager
    def validation(self, batch: MicroBatch) -> Generator[None]:
        """Forward passes of a micro-batch of the validation records."""
        with self._passes("validation", batch):
            yield

    @contextmanager
    def _passes(self, split: str, batch: MicroBatch) -> Generator[None]:
        if self._prefix is None or self._store is None:
            yield
            return
        names = self._names(split, batch)
        kept = [self._store.read(name) for name in names]
        found = [part for part in kept if part is not None]
        if len(found) == len(names):
            with self._prefix.replaying(self._joined(found, batch)):
                yield
            return
        with self._prefix.capturing() as captured:
            yield
        for name, part in zip(names, self._cut(captured[0].cpu(), batch), strict=True):
            self._store.write(name, part)

    def _names(self, split: str, batch: MicroBatch) -> list[str]:
        """What is kept of a micro-batch, by a name that is a good file name too."""
        if self._whole:
            labels = [f"{split} {','.join(map(str, batch.sample_ids))}"]
        else:
            many = len(batch.lengths) // len(batch.sample_ids)
            labels = [f"{split} {sample}/{i}" for sample in batch.sample_ids for i in range(many)]
        return [hashlib.sha256(label.encode()).hexdigest()[:32] for label in labels]

    def _cut(self, hidden_BTd: Tensor, batch: MicroBatch) -> list[Tensor]:
        if self._whole:
            return [hidden_BTd]
        lengths = batch.lengths.tolist()
        # Copies: a part would keep the whole micro-batch alive.
        return [row[:length].clone() for row, length in zip(hidden_BTd, lengths, strict=True)]

    def _joined(self, parts: list[Tensor], batch: MicroBatch) -> Tensor:
        hidden = parts[0] if self._whole else torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        return hidden.to(batch.input_ids.device, non_blocking=True)
