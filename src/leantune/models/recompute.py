"""Activation checkpointing: a decoder block keeps its input alone and computes again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from leantune.models.anatomy import decoder_blocks


def recompute_blocks(model: nn.Module, every: int = 1, offload: bool = False) -> None:
    """Let every `every`-th block of a training model keep only its input; `offload`: in host memory.

    Non-reentrant, so inputs need no gradient and keyword arguments are kept. What hooks do to the
    output of a block lies outside and is not computed again.
    """
    for index, block in enumerate(decoder_blocks(model).values()):
        if index % every == 0:
            block.forward = functools.partial(_recomputed, block, block.forward, offload)


def _recomputed(
    block: nn.Module, forward: Callable[..., Any], offload: bool, *args: Any, **kwargs: Any
) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    context: AbstractContextManager[Any] = (
        save_on_cpu(pin_memory=torch.cuda.is_available()) if offload else nullcontext()
    )
    with context:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
