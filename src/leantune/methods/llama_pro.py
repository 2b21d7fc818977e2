"""Llama-Pro (arXiv 2401.02415): train new decoder blocks between those of the model, and nothing else.

The blocks are already in the model: `leantune expand` or loading put them there as copies that add
nothing. The result is an ordinary model with more layers, and is saved as one.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from leantune.errors import ModelError
from leantune.methods.protocol import Attached
from leantune.models.anatomy import decoder_blocks
from leantune.models.expand import NEW_BLOCKS_KEY, block_input, block_output, new_blocks


class AttachedLlamaPro(Attached):
    """Llama-Pro on a model whose new blocks are `blocks` (full name: block)."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__("llama_pro", model)
        self.blocks = dict(blocks)
        self._enabled = True
        self._incoming = torch.float32
        for block in self.blocks.values():
            block.register_forward_pre_hook(self._take_in, with_kwargs=True)
            block.register_forward_hook(self._pass_on, with_kwargs=True)

    @contextmanager
    def disabled(self) -> Generator[None]:
        self._enabled = False
        try:
            yield
        finally:
            self._enabled = True

    def describe(self) -> list[str]:
        indices = ", ".join(name.rpartition(".")[2] for name in self.blocks)
        total = len(decoder_blocks(self.model))
        return [f"Llama-Pro: {len(self.blocks)} new blocks of {total} are trained: {indices}"]

    def _take_in(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Without autocast nobody else brings hidden states to the precision of the trained weights."""
        hidden = block_input(args, kwargs)
        self._incoming = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            return None
        hidden = hidden.to(next(block.parameters()).dtype)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def _pass_on(self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """What the next block gets, in the dtype that came in; if disabled, just what came in."""
        hidden = block_output(output) if self._enabled else block_input(args, kwargs)
        hidden = hidden.to(self._incoming)
        return hidden if isinstance(output, Tensor) else type(output)((hidden, *output[1:]))


def attach(model: nn.Module, *, seed: int, blocks: int) -> Attached:
    """Make the new blocks of an expanded model trainable, in fp32. `seed` is not needed: they are copies.

    Raises `ModelError` if the model has no new blocks, or another number than `blocks`.
    """
    del seed
    new = new_blocks(model.config)  # pyright: ignore[reportArgumentType]
    if new is None:
        raise ModelError(
            f"method llama_pro: this model has no new blocks (config.json: {NEW_BLOCKS_KEY}); expand it when "
            "it is loaded, or once with `leantune expand MODEL --blocks k --out DIR`"
        )
    if len(new) != blocks:
        raise ModelError(
            f"method.blocks: {blocks}, but this model was expanded by {len(new)} (config.json: "
            f"{NEW_BLOCKS_KEY}); set method.blocks={len(new)}, or expand the original model anew"
        )
    names = list(decoder_blocks(model).items())
    model.requires_grad_(False)
    chosen = dict(names[index] for index in new)
    for block in chosen.values():
        block.float().requires_grad_(True)
    return AttachedLlamaPro(model, chosen)
