"""Several trained adapters on one model, and the choice between them for each prompt of a batch."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Unpack

import torch
from torch import Tensor, nn

from leantune.errors import ModelError
from leantune.methods.prompts import EditOptions
from leantune.methods.protocol import Attached


class AdapterSet(Attached):
    """Adapters by name. Inside `edits` each prompt has one of them, or none: the base model."""

    def __init__(self, model: nn.Module, adapters: Mapping[str, Attached]) -> None:
        super().__init__("adapters", model)
        self.adapters = dict(adapters)
        self.edits_states = any(adapter.edits_states for adapter in adapters.values())

    @contextmanager
    def edits(
        self, prompt_lengths: Tensor, prompt_starts: Tensor | None = None, **options: Unpack[EditOptions]
    ) -> Generator[None]:
        """As `Attached.edits`, with the option `adapters`; `ModelError` without it or for an unknown one."""
        if "adapters" not in options:
            raise ModelError(f"choose an adapter for each prompt: {', '.join(self.adapters)}, or None")
        chosen = list(options["adapters"])
        unknown = sorted({name for name in chosen if name is not None} - self.adapters.keys())
        if unknown:
            raise ModelError(f"adapter {unknown[0]!r} is not loaded; there are {', '.join(self.adapters)}")
        if len(chosen) != len(prompt_lengths):
            raise ModelError(f"{len(chosen)} adapters were chosen for {len(prompt_lengths)} prompts")
        with ExitStack() as stack:
            for name, adapter in self.adapters.items():
                own: EditOptions = {**options, "acting": torch.tensor([c == name for c in chosen])}
                stack.enter_context(adapter.edits(prompt_lengths, prompt_starts, **own))
            yield

    @contextmanager
    def disabled(self) -> Generator[None]:
        with ExitStack() as stack:
            for adapter in self.adapters.values():
                stack.enter_context(adapter.disabled())
            yield
