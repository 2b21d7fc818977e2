"""NF4 against bitsandbytes, bit for bit, on inputs that rounding could decide differently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leantune.errors import ModelError
from leantune.ops import nf4
from leantune.ops.nf4 import (
    BLOCK,
    dequantise,
    dequantise_plain,
    dequantise_scales,
    quantise,
    quantise_scales,
)

bnb = pytest.importorskip("bitsandbytes.functional")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST_NORMAL = torch.finfo(torch.bfloat16).smallest_normal


def on_midpoints() -> Tensor:
    """Blocks with values on and right beside the middles between levels, at scales of 1 and others."""
    levels = bnb.get_4bit_type("nf4", device="cpu")
    middles = (levels[1:] + levels[:-1]) / 2
    beside = [middles, middles.nextafter(torch.tensor(9.0)), middles.nextafter(torch.tensor(-9.0))]
    block = torch.ones(1, BLOCK)
    block[0, 1:62] = torch.cat([*beside, levels])
    return torch.cat([block * factor for factor in (1.0, -1.0, 0.3, 7.0, 2.0**-100, 1e37)])


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    spread = torch.randn(64, 256) * torch.logspace(-40, 36, 64).unsqueeze(1)
    with_zeros = torch.randn(7, 192)
    with_zeros[2] = 0.0
    with_zeros[4, 64:128] = -0.0
    return {
        "normal": torch.randn(300, 576) * 0.02,
        "one block": torch.rand(1, 64) - 0.5,
        "negative": -torch.rand(33, 128),
        "midpoints": on_midpoints(),
        "zero blocks": with_zeros,
        "all zero": torch.zeros(5, 64),
        "tiny and huge": spread,
    }


WEIGHTS = weights()


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def without_subnormals(values: Tensor) -> Tensor:
    return torch.where(values.abs() < SMALLEST_NORMAL, values * 0, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_codes_scales_and_values_are_those_of_bitsandbytes(name: str, dtype: torch.dtype) -> None:
    """A level chosen otherwise at a midpoint, another order in a byte, a scale or product rounded twice."""
    weight = WEIGHTS[name].to(dtype)
    if dtype == torch.float16:
        weight = weight.clamp(-65504, 65504)
    theirs, state = bnb.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    codes, scales = quantise(weight)
    assert torch.equal(codes.flatten(), theirs.flatten())
    assert torch.equal(scales.flatten(), state.absmax)
    for out in DTYPES:
        state.dtype = out
        expected = bnb.dequantize_4bit(theirs, state)
        assert torch.equal(bits(dequantise(codes, scales, out)), bits(expected))
        plain = dequantise_plain(codes, scales, out)
        if out == torch.bfloat16:  # some CPUs' conversion makes subnormal bf16 zero, others' does not
            plain, expected = without_subnormals(plain), without_subnormals(expected)
        assert torch.equal(bits(plain), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in WEIGHTS if name != "tiny and huge"])
def test_double_quantisation_is_that_of_bitsandbytes(name: str, dtype: torch.dtype) -> None:
    """Another offset, other levels or another rounding of the 8-bit scales; the last, short block of 256."""
    weight = WEIGHTS[name].to(dtype).clamp(-65504, 65504)
    theirs, state = bnb.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
    codes, scales = quantise(weight)
    packed, nested, offset = quantise_scales(scales)
    assert packed.shape == scales.shape
    assert torch.equal(packed.flatten(), state.absmax.flatten())
    assert torch.equal(nested, state.state2.absmax)
    assert torch.equal(offset, state.offset)
    whole = dequantise_scales(packed, nested, offset)
    assert torch.equal(bits(dequantise_plain(codes, whole, dtype)), bits(bnb.dequantize_4bit(theirs, state)))


def test_the_8_bit_code_is_that_of_bitsandbytes_over_its_whole_range() -> None:
    """A level of the code, or the grid that scales are rounded to, off by one: few codes differ."""
    assert torch.equal(nf4._dynamic_levels(torch.device("cpu")), bnb.create_dynamic_map())
    torch.manual_seed(0)
    for power in (1, 3, 6):
        scales = torch.rand(1000, 256) ** power
        theirs, state = bnb.quantize_blockwise(scales - scales.mean(), blocksize=256)
        codes, nested, _ = quantise_scales(scales)
        assert torch.equal(codes, theirs)
        assert torch.equal(nested, state.absmax)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_without_bitsandbytes_the_values_are_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that gives other losses on a machine without the optional package."""
    codes, scales = quantise(torch.randn(40, 320))
    assert nf4._has_kernel(codes.device)
    with_kernel = dequantise(codes, scales, dtype)
    monkeypatch.setattr(nf4, "_has_kernel", lambda device: False)  # pyright: ignore[reportUnknownLambdaType]
    assert torch.equal(dequantise(codes, scales, dtype), with_kernel)
    assert with_kernel.dtype == dtype


def test_rows_are_packed_the_same_in_any_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that are not the rows of the whole: losses would depend on the number of ranks."""
    weight = torch.randn(37, 192)
    whole = quantise(weight)
    for start, stop in ((0, 1), (1, 20), (20, 37), (5, 5)):
        for part, expected in zip(quantise(weight[start:stop]), whole, strict=True):
            assert torch.equal(part, expected[start:stop])
    expected = dequantise_plain(*whole)
    monkeypatch.setattr(nf4, "_SLICE_VALUES", {"cpu": 400})  # two rows at a time
    assert all(torch.equal(a, b) for a, b in zip(quantise(weight), whole, strict=True))
    assert torch.equal(dequantise_plain(*whole), expected)
    assert torch.equal(dequantise(whole[0][5:9], whole[1][5:9]), expected[5:9])


def test_a_column_major_weight_is_packed_like_its_copy() -> None:
    """GPT-2's transposed weight read as if its memory were that of rows."""
    weight = torch.randn(128, 30).t()
    assert all(
        torch.equal(a, b) for a, b in zip(quantise(weight), quantise(weight.contiguous()), strict=True)
    )


class _Sizes(TorchDispatchMode):
    """The bytes of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        self.made += list(_memory(out))
        return out


def _memory(out: Any) -> Iterator[int]:
    for tensor in out if isinstance(out, tuple | list) else (out,):
        if isinstance(tensor, Tensor):
            yield tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_temporaries_stay_small_whatever_the_matrix(dtype: torch.dtype) -> None:
    """Indices or products as large as the matrix: a rank would need several times its largest weight."""
    weight = torch.randn(1024, 4096)
    codes, scales = quantise(weight)
    given = {t.untyped_storage().nbytes() for t in (weight, codes, scales)}
    with _Sizes() as sizes:
        quantise(weight)
    assert max(set(sizes.made) - given) <= 4 * 2**18
    with _Sizes() as sizes:
        dequantise_plain(codes, scales, dtype)
    given.add(weight.numel() * dtype.itemsize)
    assert max(set(sizes.made) - given) <= 4 * 2**18


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    """A damaged checkpoint that becomes a block of wrong, finite-looking values or an index error."""
    weight = torch.randn(6, 128)
    weight[3, 70] = bad
    with pytest.raises(ModelError, match=r"128 inputs .* not finite \(row 3 of the 6"):
        quantise(weight)
