"""NF4 (QLoRA, arXiv 2305.14314): 4-bit codes with a scale for each 64 values of a row, in plain PyTorch.

Codes and values are those of bitsandbytes (blocksize 64, `quant_type="nf4"`) to the bit. Rows are
packed and unpacked a slice at a time, so temporaries stay within a few MB on a CPU.

Legend: n rows, in values of a row, in/64 blocks of a row.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from functools import cache

import torch
from torch import Tensor

from leantune.errors import ModelError

BLOCK = 64  # values that share a scale
NESTED_BLOCK = 256  # scales that share a scale of their own, with double quantisation

# The 16 levels (appendix E of the paper).
_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_SMALLEST_PEAK = 1e-38  # a block of zeros is divided by this
_CELLS = 32  # cells of [-1, 1]: so fine that none holds two midpoints between levels
_GRID = 65536  # positions in [-1, 1] to which a scale is rounded before its 8-bit code is looked up
_SLICE_VALUES = {"cpu": 2**18}  # the temporaries of a slice fit in a core's cache
_SLICE_VALUES_ELSEWHERE = 2**22


@torch.no_grad()
def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pack a weight, float [n, in] with in a multiple of 64.

    Returns codes, uint8 [n, in/2] (two a byte, the first in the upper half), and scales,
    float32 [n, in/64]. Each row is packed the same whatever other rows come with it.
    Raises `ModelError` if a value is not finite.
    """
    rows, width = weight.shape
    codes = torch.empty(rows, width // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, width // BLOCK, dtype=torch.float32, device=weight.device)
    for piece in _slices(weight):
        blocks = weight[piece].float().reshape(-1, BLOCK)
        peaks = blocks.abs().amax(dim=1)
        scaled = blocks * (1.0 / peaks.clamp(min=_SMALLEST_PEAK)).unsqueeze(1)
        pairs = _nearest_levels(scaled.view(-1)).view(-1, 2)
        codes[piece] = ((pairs[:, 0] << 4) | pairs[:, 1]).view(-1, width // 2)
        scales[piece] = peaks.view(-1, width // BLOCK)
    _check_finite(scales)
    return codes, scales


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [n, in] of codes, uint8 [n, in/2], and scales, float32 [n, in/64].

    Values are float32 products, rounded once to `dtype`. Where bitsandbytes is installed its
    kernel does it: on a CPU too it is about three times as fast as the table of `dequantise_plain`.
    """
    if dtype in _KERNEL_DTYPES and codes.numel() and _has_kernel(codes.device):
        return _dequantise_kernel(codes, scales, dtype)
    return dequantise_plain(codes, scales, dtype)


def dequantise_plain(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`dequantise` by a table of the 256 pairs of levels that a byte can mean."""
    rows, width = codes.shape[0], 2 * codes.shape[1]
    weight = torch.empty(rows, width, dtype=dtype, device=codes.device)
    table = _pairs(codes.device)
    for piece in _slices(weight):
        indices = codes[piece].reshape(-1).int()
        whole = dtype == torch.float32
        values = weight[piece].view(-1) if whole else torch.empty(2 * len(indices), device=codes.device)
        torch.index_select(table, 0, indices, out=values.view(torch.int64))
        values.view(-1, BLOCK).mul_(scales[piece].reshape(-1, 1))
        if not whole:
            weight[piece] = values.view(-1, width)
    return weight


@torch.no_grad()
def quantise_scales(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Double quantisation: all scales of a weight, float32 [n, in/64], packed to 8 bits.

    Returns codes uint8 [n, in/64], nested scales float32 [ceil(n * in/64 / 256)] and the offset,
    float32 []. The 8-bit code is dynamic (arXiv 1511.04561), for the scales minus their mean.
    The mean, and blocks that span rows, make it a function of the whole weight.
    """
    flat = scales.reshape(-1).float()
    offset = flat.mean()
    blocks = torch.nn.functional.pad(flat - offset, (0, -flat.numel() % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    nested = blocks.abs().amax(dim=1)
    inverse = torch.where(nested > 0, 1.0 / nested, 0.0)
    # bitsandbytes' CPU kernel rounds to this grid too: values near the middle of two codes need it.
    position = ((blocks * inverse.unsqueeze(1)).clamp_(-1, 1) + 1) * 0.5 * (_GRID - 1) + 0.5
    index = position.view(-1).int().clamp_(0, _GRID - 1)
    codes = _grid_codes(scales.device).index_select(0, index).view(blocks.shape)
    codes = torch.where(nested.unsqueeze(1) > 0, codes, 0)
    return codes.view(-1)[: flat.numel()].view(scales.shape), nested, offset


def dequantise_scales(codes: Tensor, nested: Tensor, offset: Tensor) -> Tensor:
    """The scales, float32 [n, in/64], out of what `quantise_scales` gives."""
    values = _dynamic_levels(codes.device).index_select(0, codes.reshape(-1).int())
    full = values.numel() // NESTED_BLOCK
    values[: full * NESTED_BLOCK].view(-1, NESTED_BLOCK).mul_(nested[:full].unsqueeze(1))
    if full < nested.numel():
        values[full * NESTED_BLOCK :].mul_(nested[full])
    return values.add_(offset).view(codes.shape)


def _slices(weight: Tensor) -> list[slice]:
    """Slices of rows with about as many values as should be worked on at a time."""
    rows, width = weight.shape
    values = _SLICE_VALUES.get(weight.device.type, _SLICE_VALUES_ELSEWHERE)
    step = max(1, values // max(1, width))
    return [slice(start, start + step) for start in range(0, rows, step)]


def _check_finite(scales: Tensor) -> None:
    bad = (~scales.isfinite()).any(dim=1)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ModelError(
            f"base nf4: a weight of {scales.shape[1] * BLOCK} inputs has values that are not finite "
            f"(row {row} of the {len(scales)} being packed is the first); the checkpoint is damaged, "
            "or that layer must be named in base.keep_dense"
        )


def _nearest_levels(scaled: Tensor) -> Tensor:
    """Index of the nearest level, uint8, of float32 values in [-1, 1]; the lower one at a midpoint.

    The cell of a value tells its level but for one midpoint to compare with: several times
    faster than a binary search.
    """
    first, midpoint = _cells(scaled.device)
    cell = _cell_of(scaled)
    above = scaled > midpoint.index_select(0, cell)
    return first.index_select(0, cell).add_(above.view(torch.uint8))


def _cell_of(values: Tensor) -> Tensor:
    # Rounding keeps order, so values of another cell than a midpoint's lie on the right side of it.
    return (values + 1).mul_(_CELLS / 2).int().clamp_(0, _CELLS)


@cache
def _cells(device: torch.device) -> tuple[Tensor, Tensor]:
    """For each cell: the level at its lower end, uint8, and the midpoint in it, float32 (or infinity)."""
    levels = torch.tensor(_LEVELS, dtype=torch.float32, device="cpu")
    midpoints = (levels[1:] + levels[:-1]) / 2
    cells = _cell_of(midpoints)
    first = torch.bucketize(torch.arange(_CELLS + 1, device="cpu"), cells).to(torch.uint8)
    midpoint = torch.full((_CELLS + 1,), float("inf"), device="cpu")
    midpoint[cells.long()] = midpoints
    return first.to(device), midpoint.to(device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two levels of each byte, float32 [256, 2], as one 8-byte element each: int64 [256]."""
    levels = torch.tensor(_LEVELS, dtype=torch.float32, device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack([levels[byte >> 4], levels[byte & 15]], dim=1).view(torch.int64).view(-1).to(device)


@cache
def _dynamic_levels(device: torch.device) -> Tensor:
    """The 256 levels of the dynamic 8-bit code, ascending, float32.

    A decade of 7 from 1e-6 up to 1 has twice as many levels as the one below, in the middles of equal
    parts of its range 0.1 to 1, with either sign; 0 and 1 complete them.
    """
    levels = [torch.tensor([0.0, 1.0], device="cpu")]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32, device="cpu")
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        levels += [middles, -middles]
    return torch.cat(levels).sort().values.to(device)


@cache
def _grid_codes(device: torch.device) -> Tensor:
    """The 8-bit code of each position of the grid, uint8."""
    levels = _dynamic_levels(torch.device("cpu"))
    midpoints = (levels[:-1] + levels[1:]) * 0.5
    grid = 2.0 * torch.arange(_GRID, dtype=torch.float32, device="cpu") / (_GRID - 1) - 1.0
    return torch.bucketize(grid, midpoints).to(torch.uint8).to(device)


_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _dequantise_kernel(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    shape = (codes.shape[0], 2 * codes.shape[1])
    operation = torch.ops.bitsandbytes.dequantize_4bit.default
    return operation(codes.contiguous(), scales.contiguous(), BLOCK, "nf4", shape, dtype)


@cache
def _has_kernel(device: torch.device) -> bool:
    """Whether bitsandbytes is there and unpacks each byte on this device as the plain path does."""
    if device.type not in ("cpu", "cuda") or not _import_bitsandbytes():
        return False
    codes = torch.arange(256, device=device).to(torch.uint8).view(1, -1)
    scales = torch.linspace(0.1, 3.0, 512 // BLOCK, device=device).view(1, -1)
    try:
        return torch.equal(_dequantise_kernel(codes, scales, torch.float32), dequantise_plain(codes, scales))
    except (RuntimeError, NotImplementedError, AttributeError):  # installed without kernels for this machine
        return False


def _import_bitsandbytes() -> bool:
    if importlib.util.find_spec("bitsandbytes") is None:
        return False
    # On some CPUs its import fetches and runs a compiled product from the Hub, if the package `kernels`
    # is there, and warns if not. That product is not used here, and nothing is fetched unasked.
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level, kernels = logger.level, sys.modules.get("kernels")
    logger.setLevel(logging.ERROR)
    sys.modules["kernels"] = None  # pyright: ignore[reportArgumentType]
    try:
        importlib.import_module("bitsandbytes")
    except (ImportError, OSError, RuntimeError):
        return False
    finally:
        logger.setLevel(level)
        sys.modules.pop("kernels")
        if kernels is not None:
            sys.modules["kernels"] = kernels
    return True
