"""Activation checkpointing: a decoder block keeps its input alone and computes again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from leantune.models.anatomy import decoder_blocks


def recompute_blocks(model: nn.Module, every: int = 1, offload: bool = False) -> None:
    """Let every `every`-th block of a training model keep only its input; `offload`: in host memory.

    Non-reentrant, so inputs need no gradient and keyword arguments are kept. What hooks do to the
    output of a block lies outside and is not computed again. A block below everything that is trained keeps
    nothing at all, so there is nothing to compute again.
    """
    for index, block in enumerate(decoder_blocks(model).values()):
        if index % every == 0:
            block.forward = functools.partial(_recomputed, block, block.forward, offload)


def _recomputed(
    block: nn.Module, forward: Callable[..., Any], offload: bool, *args: Any, **kwargs: Any
) -> Any:
    if not (block.training and torch.is_grad_enabled() and _wants_gradient(block, args, kwargs)):
        return forward(*args, **kwargs)
    context: AbstractContextManager[Any] = (
        save_on_cpu(pin_memory=torch.cuda.is_available()) if offload else nullcontext()
    )
    with context:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _wants_gradient(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether backward will come to this block."""
    tensors = (*block.parameters(), *tree_leaves((args, kwargs)))
    return any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)
