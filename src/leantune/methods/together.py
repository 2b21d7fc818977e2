"""Several methods on one model: LoRA and ReFT in one run, or a method and a trained head."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Unpack

from torch import Tensor, nn

from leantune.methods.prompts import EditOptions
from leantune.methods.protocol import Attached

TOGETHER = "together"


class AttachedTogether(Attached):
    """Methods that were attached to the same model one after the other; each saves its own files."""

    def __init__(self, parts: Sequence[Attached]) -> None:
        super().__init__("+".join(part.name for part in parts), parts[0].model)
        self._parts = list(parts)
        self.edits_states = any(part.edits_states for part in parts)
        self.names_subspaces = any(part.names_subspaces for part in parts)
        self.markers = next((part.markers for part in parts if part.markers is not None), None)
        self.embeddings = next((p.embeddings for p in parts if p.embeddings is not None), None)

    def parts(self) -> Sequence[Attached]:
        return self._parts

    def decay_free(self) -> set[str]:
        return set[str]().union(*(part.decay_free() for part in self._parts))

    def pinned(self) -> set[str]:
        return set[str]().union(*(part.pinned() for part in self._parts))

    def frozen_blocks(self) -> int:
        return min(part.frozen_blocks() for part in self._parts)

    @contextmanager
    def edits(
        self, prompt_lengths: Tensor, prompt_starts: Tensor | None = None, **options: Unpack[EditOptions]
    ) -> Generator[None]:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.edits(prompt_lengths, prompt_starts, **options))
            yield

    @contextmanager
    def disabled(self) -> Generator[None]:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.disabled())
            yield

    def subspace_mask(self, names: Sequence[str | int]) -> Tensor:
        return self._with_positions().subspace_mask(names)

    def num_edited(self, prompt_length: int) -> int | None:
        return self._with_positions().num_edited(prompt_length)

    def row_norm_targets(self) -> Mapping[str, nn.Module]:
        return {name: module for part in self._parts for name, module in part.row_norm_targets().items()}

    def set_row_norms(self, name: str, unquantised: Tensor, stored: Tensor) -> None:
        for part in self._parts:
            if name in part.row_norm_targets():
                part.set_row_norms(name, unquantised, stored)

    def before_step(self) -> None:
        for part in self._parts:
            part.before_step()

    def after_step(self) -> None:
        for part in self._parts:
            part.after_step()

    def describe(self) -> list[str]:
        return [line for part in self._parts for line in part.describe()]

    def _with_positions(self) -> Attached:
        """The part that edits by position, if there is one."""
        return next((p for p in self._parts if p.edits_states), self._parts[0])


def join(parts: Sequence[Attached]) -> Attached:
    """One `Attached` of several; a single one as it is."""
    return parts[0] if len(parts) == 1 else AttachedTogether(parts)
