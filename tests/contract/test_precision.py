"""Every precision is what its row of the table says: in weights, in what is trained, in the arithmetic."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import leantune
from leantune.config.grid import refusal
from leantune.config.precision import PRECISIONS as TABLE
from leantune.methods import Attached
from leantune.models.anatomy import linears
from leantune.models.packed import PackedLinear
from leantune.models.precision import PRECISIONS
from leantune.train.build import BuiltModel
from leantune.train.forward import summed_loss
from tests.batches import shake, small_batch
from tests.grid import built

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CELLS = [
    cell
    for cell in itertools.product(("lora", "loreft", "full"), ("dense", "nf4"))
    if refusal(*cell, "single") is None
]
EVERY_PRECISION = pytest.mark.parametrize("precision", list(TABLE))
EVERY_CELL = pytest.mark.parametrize(("method", "base"), CELLS)
ROTARY = ("inv_freq", "original_inv_freq")
BATCH = small_batch()


def test_the_table_of_words_and_that_of_dtypes_agree() -> None:
    """The help explained other types than those that the run took."""
    assert list(PRECISIONS) == list(TABLE)
    for name, row in TABLE.items():
        precision = PRECISIONS[name]
        assert DTYPES[row.weights] == precision.weights
        assert DTYPES[row.trained] == precision.trained
        assert DTYPES[row.buffers] == precision.buffers
        computes, _, how = row.compute.partition(" ")
        assert precision.compute == (DTYPES[computes] if how == "(autocast)" else None)
        # Without autocast the arithmetic is done in the types that come together in it.
        assert how or DTYPES[computes] == precision.weights == precision.trained
        assert precision.scaled == ("loss scale" in row.note)


def one_pass(model: BuiltModel, precision: str) -> tuple[float, set[torch.dtype]]:
    """The loss of a batch with its gradients, and the dtypes in which linear layers of blocks answer."""
    attached: Attached = model.attached
    answers = set[torch.dtype]()
    hooks = [
        layer.register_forward_hook(lambda _m, _a, out: answers.add(out.dtype))
        for layer in linears(attached.model).values()
    ]
    model.model.train()
    with attached.edits(BATCH.prompt_lengths):
        loss = summed_loss(model.model, BATCH, PRECISIONS[precision])
        loss.backward()
    for hook in hooks:
        hook.remove()
    return loss.item(), answers


@EVERY_PRECISION
@EVERY_CELL
def test_everything_has_the_type_that_the_table_names(
    method: str, base: str, precision: str, wide_folder: Callable[[str], Path]
) -> None:
    """Adapters that were made in the type of the weights, or tables that were cast along with them."""
    row = TABLE[precision]
    # Gemma 2 has a buffer besides its rotary tables.
    model = built(wide_folder("gemma2"), method, base, precision=precision)
    trained = model.attached.trainable()
    assert {p.dtype for p in trained.values()} == {DTYPES["fp32" if method == "loreft" else row.trained]}
    frozen = {n: p for n, p in model.model.named_parameters() if n not in trained}
    stored = {p.dtype for p in frozen.values()}
    assert stored == (set() if method == "full" else {DTYPES[row.weights]} | ({torch.uint8} & stored))
    assert (torch.uint8 in stored) == (base == "nf4")
    rotary = {b.dtype for n, b in model.model.named_buffers() if n.endswith(ROTARY)}
    others = {b.dtype for n, b in model.model.named_buffers() if not n.endswith(ROTARY)}
    assert rotary == {torch.float32}
    assert others == {DTYPES[row.buffers]}
    _, answers = one_pass(model, precision)
    assert answers == {DTYPES[row.compute.split()[0]]}
    for name, parameter in trained.items():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == parameter.dtype
        assert bool(torch.isfinite(parameter.grad).all()), name


def packed(model: BuiltModel) -> dict[str, Tensor]:
    """Copies of all that packed layers consist of."""
    layers = {n: m for n, m in model.model.named_modules() if isinstance(m, PackedLinear)}
    return {
        f"{name}.{key}": value.detach().clone()
        for name, layer in layers.items()
        for key, value in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
    }


@EVERY_PRECISION
@pytest.mark.parametrize("double_quant", [False, True])
def test_codes_and_scales_of_a_packed_base_are_the_same_in_every_precision(
    precision: str, double_quant: bool, wide_folder: Callable[[str], Path]
) -> None:
    """Scales that are rounded to 8 bits of mantissa shift every weight of their block."""
    settings = {"name": "nf4", "double_quant": double_quant}

    expected = packed(built(wide_folder("llama"), "lora", settings))
    model = built(wide_folder("llama"), "lora", settings, precision=precision)
    shake(model.attached)
    one_pass(model, precision)
    found = packed(model)
    assert found.keys() == expected.keys()
    assert all(value.dtype == torch.uint8 for value in found.values())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "records.jsonl"
    rows = [
        {"prompt": f"SELECT {'name ' * i}WHERE age > {i}", "completion": f"there are {i}"} for i in range(4)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("precision", [name for name in TABLE if name != "fp32"])
@EVERY_CELL
def test_a_run_in_every_precision_learns_what_one_in_fp32_learns(
    method: str,
    base: str,
    precision: str,
    wide_folder: Callable[[str], Path],
    data: Path,
    reference: Callable[[str, str], Any],
    tmp_path: Path,
) -> None:
    """On the CPU too, where this is tried before a GPU is paid for; and what it leaves can be used."""
    result = trained(wide_folder("llama"), data, tmp_path, method, base, precision)
    expected = reference(method, base)
    assert result.first_loss == pytest.approx(expected.first_loss, rel=1e-3)
    assert result.last_loss == pytest.approx(expected.last_loss, rel=2e-3)
    assert result.last_loss < result.first_loss
    loaded = leantune.load(result.folder, device="cpu")
    assert loaded.trained.precision == PRECISIONS[precision]
    assert len(loaded.generate("SELECT", leantune.Sampling(max_new_tokens=2))) == 1


@pytest.fixture(scope="module")
def reference(
    wide_folder: Callable[[str], Path], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Any]:
    """The same run in fp32, by method and base."""
    results: dict[tuple[str, str], Any] = {}

    def result_of(method: str, base: str) -> Any:
        if (method, base) not in results:
            place = tmp_path_factory.mktemp("reference")
            results[method, base] = trained(wide_folder("llama"), data, place, method, base, "fp32")
        return results[method, base]

    return result_of


def trained(model: Path, data: Path, place: Path, method: str, base: str, precision: str) -> Any:
    config = {
        "model": str(model),
        "data": {"train": str(data), "format": "prompt_completion"},
        "method": method,
        "base": base,
        "train": {
            "precision": precision,
            "device": "cpu",
            "max_steps": 2,
            "learning_rate": 1e-2,
            "epochs": 2,
        },
        "output": {"dir": str(place / "run"), "checkpoints": False},
    }
    return leantune.train(config, quiet=True)
