"""The leading decoder blocks of a model, whose output can be kept and given back instead of computed.

Legend: B sequences, T tokens, d hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from transformers.cache_utils import Cache

from leantune.models.anatomy import decoder_blocks, text_config
from leantune.models.expand import block_input, block_output


class FrozenPrefix:
    """The first `num_blocks` decoder blocks of a model, once it has been placed on its ranks.

    It replaces the `forward` of the blocks and nothing around it: hooks on them (interventions, gathering of
    shards) still run, and embeddings, masks and positions are the model's own.
    """

    def __init__(self, model: nn.Module, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Why a pass without the prefix would not be the same, if a pass has shown that.
        self.obstacle: str | None = None
        self._num_outputs: dict[int, int | None] = {}  # of a tuple; None where a block returns a tensor
        self._captured: list[Tensor] | None = None
        self._replayed: Tensor | None = None
        for index, block in enumerate([*decoder_blocks(model).values()][:num_blocks]):
            block.forward = functools.partial(self._forward, index, block.forward)

    @contextmanager
    def capturing(self) -> Generator[list[Tensor]]:
        """The list that is yielded gets what the prefix puts out in each forward pass inside, [B, T, d]."""
        self._captured = []
        try:
            yield self._captured
        finally:
            self._captured = None

    @contextmanager
    def replaying(self, hidden_BTd: Tensor) -> Generator[None]:
        """Forward passes inside do not compute the prefix, but go on from these states.

        There must have been a pass inside `capturing` before: it shows in what form blocks return states.
        """
        self._replayed = hidden_BTd
        try:
            yield
        finally:
            self._replayed = None

    def _forward(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_last = index == self.num_blocks - 1
        if self._replayed is not None:
            hidden = self._replayed.clone() if is_last else block_input(args, kwargs)
            length = self._num_outputs[index]
            return hidden if length is None else (hidden, *[None] * (length - 1))
        output = forward(*args, **kwargs)
        if self._captured is not None:
            self._look_at(index, kwargs, output)
            if is_last:
                # A copy: what follows may change the states in place.
                self._captured.append(block_output(output).detach().clone())
        return output

    def _look_at(self, index: int, kwargs: dict[str, Any], output: Any) -> None:
        """Remember the form of an output, and whether blocks tell later ones more than hidden states."""
        self._num_outputs[index] = None if isinstance(output, Tensor) else len(output)
        shared = [name for name, value in kwargs.items() if isinstance(value, dict | list | Cache)]
        more = not isinstance(output, Tensor) and any(
            isinstance(part, Tensor) for part in cast("tuple[Any, ...]", output)[1:]
        )
        if shared:
            self.obstacle = f"decoder blocks hand on {', '.join(shared)} to later ones"
        elif more:
            self.obstacle = "decoder blocks return more than hidden states"


def random_parts(model: nn.Module, num_blocks: int) -> list[str]:
    """What may draw random numbers in training before block `num_blocks`: modules and configuration keys."""
    later = [f"{name}." for name in [*decoder_blocks(model)][num_blocks:]]
    modules = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module.p > 0 and not name.startswith(tuple(later))
    ]
    # Many models drop by functions; these keys are of parts that a causal model does not run.
    unused = ("classifier", "summary")
    settings = cast("dict[str, Any]", text_config(model).to_dict())
    keys = [
        f"config {key}={value}"
        for key, value in settings.items()
        if ("drop" in key or "jitter" in key)
        and not key.startswith(unused)
        and isinstance(value, float)
        and value > 0
    ]
    return [*modules, *keys]
