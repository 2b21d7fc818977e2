"""Logits only where there is a label, for any decoder.

The hidden states are narrowed just before the output head, so whatever the model does to
its logits afterwards (scaling, soft-capping) is done by the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils.generic import ModelOutput

from leantune.errors import ModelError
from leantune.models.anatomy import output_head
from leantune.ops.loss import summed_cross_entropy


@contextmanager
def _head_sees_only(model: nn.Module, label_index_N: Tensor) -> Iterator[None]:
    def narrow(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_BTD: Tensor = args[0]
        return (hidden_BTD.flatten(0, -2).index_select(0, label_index_N).unsqueeze(0), *args[1:])

    handle = output_head(model).register_forward_pre_hook(narrow)
    try:
        yield
    finally:
        handle.remove()


def labelled_logits(model: nn.Module, input_ids_BT: Tensor, label_index_N: Tensor) -> Tensor:
    """Logits [N, V] at the flat positions `label_index_N` (row * T + column) of a right-padded batch.

    No attention mask is passed: with right padding and causal attention no label sees a
    padding token, and the fused attention kernels stay available.
    """
    with _head_sees_only(model, label_index_N):
        logits: Tensor = model(input_ids=input_ids_BT, use_cache=False).logits
    if logits.shape[:2] != (1, len(label_index_N)):
        raise ModelError(
            f"{type(model).__name__} does not send its hidden states through get_output_embeddings(); "
            f"its logits have shape {tuple(logits.shape)} where (1, {len(label_index_N)}, V) was expected"
        )
    return logits[0]


def final_hidden(model: nn.Module, input_ids_BT: Tensor, index_N: Tensor) -> Tensor:
    """The states that the output head reads, after the final norm, at these flat positions: [N, d].

    As in `labelled_logits` no attention mask is passed. The head itself computes one position only.
    """
    seen: list[Tensor] = []

    def take(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        seen.append(args[0].flatten(0, -2))
        return (args[0][..., :1, :], *args[1:])

    with _head_sees_only(model, index_N):
        handle = output_head(model).register_forward_pre_hook(take)
        try:
            model(input_ids=input_ids_BT, use_cache=False)
        finally:
            handle.remove()
    if len(seen) != 1 or len(seen[0]) != len(index_N):
        raise ModelError(f"{type(model).__name__} does not send its hidden states through its output head")
    return seen[0]


def chunked_loss(
    model: nn.Module, input_ids_BT: Tensor, label_index_N: Tensor, labels_N: Tensor, chunk: int
) -> Tensor:
    """The summed cross-entropy of `labelled_logits`, with logits of `chunk` positions in memory at a time.

    Each chunk goes through the output head again in backward. What the model does after its decoder
    is done by the model itself: it runs with its decoder replaced by the hidden states of a chunk.
    """
    body = _decoder(model)
    outputs: list[Any] = []
    handle = body.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    try:
        # Logits of one position: the decoder is all that is wanted of this pass.
        labelled_logits(model, input_ids_BT, label_index_N[:1])
    finally:
        handle.remove()
    (output,) = outputs
    hidden_ND: Tensor = output[0].flatten(0, -2).index_select(0, label_index_N)
    output_of = _like(output)
    total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
    for start in range(0, len(labels_N), chunk):
        part, labels = hidden_ND[start : start + chunk], labels_N[start : start + chunk]
        total = total + checkpoint(_chunk_loss, model, body, output_of, part, labels, use_reentrant=False)
    return total


def _like(output: Any) -> Callable[[Tensor], Any]:
    """Makes what a decoder returns of hidden states: models look for fields of its own kind, experts' say."""
    if isinstance(output, ModelOutput):
        kind, first = type(output), next(iter(output))
        return lambda hidden: kind(**{first: hidden})
    return lambda hidden: (hidden, *([None] * (len(output) - 1)))


def _chunk_loss(
    model: nn.Module,
    body: nn.Module,
    output_of: Callable[[Tensor], Any],
    hidden_ND: Tensor,
    labels_N: Tensor,
) -> Tensor:
    output = output_of(hidden_ND.unsqueeze(0))
    plain = body.forward
    body.forward = lambda *_args, **_options: output
    try:
        # `forward` itself: this is no forward pass of the model to those who watch over it with hooks.
        logits: Tensor = model.forward(input_ids=labels_N.unsqueeze(0), use_cache=False).logits
    finally:
        body.forward = plain
    return summed_cross_entropy(logits[0], labels_N)


def _decoder(model: nn.Module) -> nn.Module:
    body: Any = getattr(model, "base_model", None)
    if not isinstance(body, nn.Module) or body is model:
        raise ModelError(
            f"train.loss_chunk_tokens: {type(model).__name__} keeps no decoder of its own (base_model) whose "
            "hidden states could go to the head in chunks; remove the key"
        )
    return body
