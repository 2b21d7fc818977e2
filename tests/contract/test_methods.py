"""What every method promises, whatever the model: names, seeds, decay, dtypes.

Methods are found by the registry: a new file in `leantune/methods` is tested without a change here.
`test_cells` has what they must do on every architecture and base.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from leantune.config.grid import REFT_METHODS
from leantune.methods import method_names
from tests.batches import gradients, logits_of, shake, small_batch
from tests.methods import attached_to, model_for

METHODS = method_names()
# What these train comes with the model.
NOTHING_NEW = {"full", "llama_pro"}
EVERY_METHOD = pytest.mark.parametrize("method", METHODS)
BATCH = small_batch()


def test_the_registry_finds_the_methods_and_no_other_files() -> None:
    assert set(METHODS) == {"full", "lora", "dora", "llama_pro", *REFT_METHODS}


@EVERY_METHOD
def test_new_parameters_depend_on_the_seed_and_on_nothing_else(method: str) -> None:
    """Case 14: ranks that had drawn other random numbers before started from other adapters."""
    first = attached_to(method).trainable()
    torch.rand(17)
    second = attached_to(method).trainable()
    other = attached_to(method, seed=1).trainable()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    same = all(torch.equal(first[name], other[name]) for name in first)
    assert same == (method in NOTHING_NEW)


@EVERY_METHOD
def test_layers_of_one_model_start_differently(method: str) -> None:
    """One stream of random numbers, begun anew for each layer, made all layers the same."""
    parameters = attached_to(method).trainable()
    matrices = [p for p in parameters.values() if p.ndim == 2 and bool((p != 0).any())]
    for i, one in enumerate(matrices):
        assert all(one.shape != other.shape or not torch.equal(one, other) for other in matrices[i + 1 :])


@EVERY_METHOD
def test_decay_spares_vectors(method: str) -> None:
    """Norms and biases that weight decay pulls to zero."""
    attached = attached_to(method, "gpt2")
    spared, trainable = attached.decay_free(), attached.trainable()
    assert spared <= set(trainable)
    assert {name for name, p in trainable.items() if p.ndim < 2} <= spared


@pytest.mark.parametrize("method", [name for name in METHODS if name != "full"])
def test_frozen_weights_in_bf16_keep_trained_weights_in_fp32(method: str) -> None:
    """Precision bf16_mixed on training, and generation in bf16 without autocast."""
    model: Any = model_for(method)
    attached = attached_to(method, model=model.to(torch.bfloat16))
    shake(attached)
    assert {p.dtype for p in attached.trainable().values()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(attached, BATCH)
    assert {n for n, g in found.items() if g is not None} == set(attached.trainable())
    assert logits_of(attached, BATCH).dtype == torch.bfloat16
