"""Logits only where there is a label, for any decoder.

The hidden states are narrowed just before the output head, so whatever the model does to
its logits afterwards (scaling, soft-capping) is done by the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from leantune.errors import ModelError
from leantune.models.anatomy import output_head


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
