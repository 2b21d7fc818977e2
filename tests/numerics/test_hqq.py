"""Half-quadratic quantisation: its packing, its solver against the `hqq` package, its limits."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from leantune.ops.hqq import bytes_per_row, dequantise, pack_codes, quantise, unpack_codes

BITS = (8, 4, 3, 2)


def weights(rows: int = 48, in_features: int = 384, spread: float = 0.05, seed: int = 0) -> Tensor:
    """Values with tails heavier than a normal distribution's, as trained weights have."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, in_features, generator=generator)
    return spread * normal * (1 + 0.3 * torch.randn(rows, in_features, generator=generator)).abs()


def restored(weight: Tensor, bits: int, group_size: int) -> Tensor:
    return dequantise(*quantise(weight, bits, group_size), bits, weight.shape[1], torch.float32)


def group_errors(values: Tensor, weight: Tensor, group_size: int, power: float = 1.0) -> Tensor:
    """Mean |values - weight| ** power of each group."""
    difference = (values.reshape(weight.shape) - weight).double().abs() ** power
    return difference.reshape(-1, group_size).mean(dim=1)


def package(weight: Tensor, bits: int, group_size: int, solve: bool) -> tuple[Tensor, Tensor]:
    """Codes and values [groups, group_size] of the hqq package, its solver running all 20 iterations."""
    optimize = pytest.importorskip("hqq.core.optimize")
    quantizer: Any = pytest.importorskip("hqq.core.quantize").Quantizer
    options = {"lp_norm": 0.7, "beta": 10.0, "kappa": 1.01, "iters": 20, "tol": 0.0}
    options |= {"early_stop": False, "scale_gridsearch": False}
    solver = partial(optimize.optimize_weights_proximal_v2, opt_params=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizer, "optimize_weights", staticmethod(solver))
        codes, meta = quantizer.quantize(
            weight, bits, group_size=group_size, axis=1, device="cpu", optimize=solve, bitpack=False
        )
    codes = codes.reshape(-1, group_size)
    return codes, (codes - meta["zero"]) * meta["scale"]


@pytest.mark.parametrize("bits", BITS)
def test_codes_survive_packing(bits: int) -> None:
    """A code that comes back as its neighbour's: every value at every place of a packed unit."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (64, 40), generator=generator, dtype=torch.uint8)
    codes[0], codes[1] = 0, 2**bits - 1
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (64, bytes_per_row(40, bits))
    assert torch.equal(unpack_codes(packed, bits, 40), codes)
    for place in range(40):  # one code alone: no bit of it may appear elsewhere
        single = torch.zeros(1, 40, dtype=torch.uint8)
        single[0, place] = 2**bits - 1
        assert torch.equal(unpack_codes(pack_codes(single, bits), bits, 40), single)


@pytest.mark.parametrize("bits", BITS)
def test_slices_of_rows_equal_the_whole(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that differ from the same rows quantised at once (a stop on the mean error of a slice).

    The spreads reach from groups that the shrinkage leaves alone to those that it moves.
    """
    weight = weights(41, 96, 1.0) * torch.logspace(-3, 1, 41)[:, None]
    whole = quantise(weight, bits, 32)
    for start, stop in [(0, 1), (7, 8), (0, 20), (20, 41), (39, 41)]:
        for part, expected in zip(quantise(weight[start:stop], bits, 32), whole, strict=True):
            assert torch.equal(part, expected[start:stop])
    monkeypatch.setattr("leantune.ops.hqq._SLICE_VALUES", 300)  # three rows at a time
    sliced = quantise(weight, bits, 32)
    assert all(torch.equal(part, expected) for part, expected in zip(sliced, whole, strict=True))
    values = dequantise(*whole, bits, 96, torch.float32)
    monkeypatch.undo()
    assert torch.equal(dequantise(*whole, bits, 96, torch.float32), values)


@pytest.mark.parametrize("spread", [0.05, 1.0])
@pytest.mark.parametrize(("bits", "group_size"), list(itertools.product(BITS, (32, 64, 128))))
def test_codes_and_errors_match_the_package(bits: int, group_size: int, spread: float) -> None:
    """A solver that drifts from the package's (of each group, that or round-to-nearest, the better)."""
    weight = weights(spread=spread)
    solved_codes, solved = package(weight, bits, group_size, solve=True)
    nearest_codes, nearest = package(weight, bits, group_size, solve=False)
    solved_error = group_errors(solved, weight, group_size)
    is_solved = solved_error < group_errors(nearest, weight, group_size)
    assert 0.05 < is_solved.float().mean() < 1  # both kinds are in the data
    codes, scale, zero = quantise(weight, bits, group_size)
    ours = unpack_codes(codes, bits, weight.shape[1]).reshape(-1, group_size)
    expected = torch.where(is_solved[:, None], solved_codes, nearest_codes)
    assert (ours == expected).float().mean() > 0.999
    values = dequantise(codes, scale, zero, bits, weight.shape[1], torch.float32)
    assert group_errors(values, weight, group_size).mean() <= solved_error.mean()
    objective = group_errors(values, weight, group_size, power=0.7).mean()
    assert objective <= group_errors(solved, weight, group_size, power=0.7).mean()


def test_small_weights_keep_their_resolution() -> None:
    """Groups of small range lost: the package stores ranges below 1e-4 as one value, for half precision."""
    weight = weights(8, 64, spread=1e-6)
    assert group_errors(restored(weight, 8, 64), weight, 64).max() < 0.01 * weight.abs().mean()
    _, theirs = package(weight, 8, 64, solve=True)
    assert group_errors(theirs, weight, 64).mean() > 0.5 * weight.abs().mean()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [32, 24, 96])
def test_no_group_is_worse_than_round_to_nearest(bits: int, group_size: int) -> None:
    """A solver that improves the mean of a matrix at the cost of some groups."""
    weight = weights(32, 96, 1.0) * torch.logspace(-3, 1, 32)[:, None]
    groups = weight.reshape(-1, group_size).double()
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    nearest = ((groups - low) / step).round() * step + low
    limit = group_errors(nearest, weight.double(), group_size)
    errors = group_errors(restored(weight, bits, group_size), weight, group_size)
    assert (errors <= limit * (1 + 1e-4)).all()
    assert errors.mean() < 0.995 * limit.mean()


def test_error_falls_with_bits_and_with_smaller_groups() -> None:
    """Bits or groups that are stored but not used."""
    weight = weights()
    by_bits = [group_errors(restored(weight, bits, 64), weight, 64).mean() for bits in (2, 3, 4, 8)]
    assert by_bits == sorted(by_bits, reverse=True)
    assert by_bits[0] > 10 * by_bits[3]
    by_group = [group_errors(restored(weight, 4, g), weight, g).mean() for g in (128, 64, 32)]
    assert by_group == sorted(by_group, reverse=True)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 1.7, -0.3, 1e-38, -4e30])
def test_constant_groups_come_back_exactly(bits: int, value: float) -> None:
    """Division by the range of a group whose values are all equal: NaN in a layer with a zero row."""
    weight = weights(4, 64)
    weight[1], weight[2, 32:] = value, value
    codes, scale, zero = quantise(weight, bits, 32)
    assert torch.isfinite(scale).all()
    assert torch.isfinite(zero).all()
    values = dequantise(codes, scale, zero, bits, 64, torch.float32)
    assert torch.equal(values[1], weight[1])
    assert torch.equal(values[2, 32:], weight[2, 32:])


def test_nearly_constant_groups_stay_close() -> None:
    """A zero of 1e8 codes, whose rounding throws the values far away."""
    weight = torch.full((1, 64), 1.0)
    weight[0, ::3] += torch.finfo(torch.float32).eps
    assert (restored(weight, 4, 64) - weight).abs().max() < 1e-6


@pytest.mark.parametrize("bits", BITS)
def test_lower_precisions_are_roundings_of_float32(bits: int) -> None:
    """Arithmetic in bf16, where codes above 256 minus a zero lose their last bits."""
    weight = weights(8, 64)
    packed = quantise(weight, bits, 32)
    values = dequantise(*packed, bits, 64, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(dequantise(*packed, bits, 64, dtype), values.to(dtype))
