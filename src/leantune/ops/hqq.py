"""Half-quadratic quantisation to 8, 4, 3 or 2 bits (Badri and Shaji, "Half-Quadratic Quantization", 2023).

w ≈ (q - zero) * scale, with one scale and one zero for each group of values along a row. The
`hqq` package serves as a test oracle only: its kernels read another layout and need a build of their own.

Legend: n rows, i in features, k groups of a row, g values of a group, M groups of a slice of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

# bits: values that are packed together, in bits bytes per 8 of them
PACKED_TOGETHER = {8: 1, 4: 2, 3: 8, 2: 4}

_SLICE_VALUES = 1 << 18  # weights worked on at a time: 1 MB a temporary, which stays in cache
_ITERATIONS = 20
_LP_NORM = 0.7
_BETA, _KAPPA = 10.0, 1.01
_FLAT = 1e-30  # a group whose range is below this is stored as its minimum


def bytes_per_row(in_features: int, bits: int) -> int:
    """Bytes of the codes of one row."""
    return in_features * bits // 8


@torch.no_grad()
def quantise(weight_ni: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a weight: codes uint8 [n, in * bits / 8], scale and zero float32 [n, in / group_size].

    weight_ni: float32 [n, in], in divisible by group_size and by `PACKED_TOGETHER[bits]`. What a
    group becomes depends on its own values only: any slice of rows gives the rows of the whole, bit
    for bit. Per group the mean absolute error is at most that of round-to-nearest.
    """
    rows, in_features = weight_ni.shape
    codes_nb = weight_ni.new_empty(rows, bytes_per_row(in_features, bits), dtype=torch.uint8)
    scale_nk = weight_ni.new_empty(rows, in_features // group_size, dtype=torch.float32)
    zero_nk = torch.empty_like(scale_nk)
    step = max(1, _SLICE_VALUES // in_features)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        # Groups as columns: their scales and sums are then long contiguous rows.
        weight_gM = weight_ni[part].float().reshape(-1, group_size).t().contiguous()
        codes_gM, scale_M, zero_M = _quantise_groups(weight_gM, 2**bits - 1)
        codes_nb[part] = pack_codes(codes_gM.t().reshape(-1, in_features), bits)
        scale_nk[part] = scale_M.view(-1, in_features // group_size)
        zero_nk[part] = zero_M.view(-1, in_features // group_size)
    return codes_nb, scale_nk, zero_nk


@torch.no_grad()
def dequantise(
    codes_nb: Tensor, scale_nk: Tensor, zero_nk: Tensor, bits: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    """The weight [n, in] that codes, scale and zero stand for; computed in float32, then cast to `dtype`."""
    rows, groups = scale_nk.shape
    weight_ni = torch.empty(rows, in_features, dtype=dtype, device=codes_nb.device)
    # On a GPU a slice costs kernel launches, and there is no cache to stay in.
    step = max(1, (_SLICE_VALUES if codes_nb.device.type == "cpu" else 64 * _SLICE_VALUES) // in_features)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        codes_ni = unpack_codes(codes_nb[part], bits, in_features)
        values = codes_ni.float().view(-1, groups, in_features // groups)
        values.sub_(zero_nk[part].unsqueeze(2)).mul_(scale_nk[part].unsqueeze(2))
        weight_ni[part] = values.view(-1, in_features)
    return weight_ni


def pack_codes(codes_ni: Tensor, bits: int) -> Tensor:
    """Codes uint8 [n, in], each below 2 ** bits, as bytes uint8 [n, in * bits / 8].

    A row is cut into `PACKED_TOGETHER[bits]` equal runs, and the values at one place of all runs
    share their bytes (8 bits: one; 4: two in a byte; 2: four in a byte; 3: eight in three bytes).
    """
    runs = codes_ni.chunk(PACKED_TOGETHER[bits], dim=1)
    if bits == 8:
        return codes_ni.clone()
    if bits == 4:
        return runs[0] << 4 | runs[1]
    if bits == 2:
        return runs[0] << 6 | runs[1] << 4 | runs[2] << 2 | runs[3]
    a, b, c, d, e, f, g, h = runs
    first = a << 5 | b << 2 | c >> 1
    second = c << 7 | d << 4 | e << 1 | f >> 2
    third = f << 6 | g << 3 | h
    return torch.cat([first, second, third], dim=1)


def unpack_codes(codes_nb: Tensor, bits: int, in_features: int) -> Tensor:
    """The way back from `pack_codes`: uint8 [n, in]."""
    if bits == 8:
        return codes_nb
    codes_ni = torch.empty(codes_nb.shape[0], in_features, dtype=torch.uint8, device=codes_nb.device)
    runs = codes_ni.chunk(PACKED_TOGETHER[bits], dim=1)
    mask = 2**bits - 1
    if bits == 3:
        first, second, third = codes_nb.chunk(3, dim=1)
        sources = [first >> 5, first >> 2, first << 1 | second >> 7, second >> 4, second >> 1]
        sources += [second << 2 | third >> 6, third >> 3, third]
        for run, source in zip(runs, sources, strict=True):
            torch.bitwise_and(source, mask, out=run)
        return codes_ni
    for index, run in enumerate(runs):
        torch.bitwise_right_shift(codes_nb, 8 - bits * (index + 1), out=run)
        if index:
            run.bitwise_and_(mask)
    return codes_ni


def _quantise_groups(weight_gM: Tensor, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [g, M], scale and zero [M] of groups that are columns."""
    low_M, high_M = weight_gM.aminmax(dim=0)
    range_M = high_M - low_M
    inverse_M = torch.where(range_M < _FLAT, torch.ones_like(range_M), largest / range_M)
    zero_M = -low_M * inverse_M
    scaled_gM = weight_gM * inverse_M
    nearest_gM = _round(scaled_gM, zero_M, largest)
    nearest_zero_M, nearest_error_M = zero_M, _error(nearest_gM, scaled_gM, zero_M)
    codes_gM = nearest_gM
    beta = _BETA
    for _ in range(_ITERATIONS):
        target_gM = codes_gM - scaled_gM
        # No residual of a group exceeds this: rounding costs half a code, clamping what sticks out.
        below_M, above_M = -(low_M * inverse_M + zero_M), high_M * inverse_M + zero_M - largest
        bound_M = torch.maximum(below_M, above_M).clamp_(min=0.5) / inverse_M
        _add_shrunk_residual(target_gM, zero_M, inverse_M, bound_M, beta)
        zero_M = _column_sum(target_gM) / len(weight_gM)
        codes_gM = _round(scaled_gM, zero_M, largest)
        beta *= _KAPPA
    better_M = _error(codes_gM, scaled_gM, zero_M) < nearest_error_M
    codes_gM = torch.where(better_M, codes_gM, nearest_gM)
    zero_M = torch.where(better_M, zero_M, nearest_zero_M)
    return codes_gM.to(torch.uint8), 1.0 / inverse_M, zero_M


def _add_shrunk_residual(
    target_gM: Tensor, zero_M: Tensor, inverse_M: Tensor, bound_M: Tensor, beta: float
) -> None:
    """Add the residual w - (q - zero) * scale, shrunk by the proximal operator of the lp norm (p < 1).

    The operator gives zero below beta ** (1 / (p - 2)), where most groups lie wholly: those that
    their bound shows to lie there are left alone. float64 keeps the power independent of how
    many columns there are, which float32 kernels do not promise.
    """
    threshold = beta ** (1 / (_LP_NORM - 2))
    columns = (bound_M > 0.999 * threshold).nonzero().squeeze(1)
    if len(columns) == 0:
        return
    target_gC, inverse_C = target_gM[:, columns].double(), inverse_M[columns].double()
    residual_gC = (zero_M[columns] - target_gC) / inverse_C
    size_gC = residual_gC.abs()
    shrunk_gC = (size_gC - size_gC ** (_LP_NORM - 1) / beta).clamp_(min=0).mul_(residual_gC.sign())
    target_gM[:, columns] = (target_gC + shrunk_gC * inverse_C).float()


def _round(scaled_gM: Tensor, zero_M: Tensor, largest: int) -> Tensor:
    return (scaled_gM + zero_M).round_().clamp_(0, largest)


def _error(codes_gM: Tensor, scaled_gM: Tensor, zero_M: Tensor) -> Tensor:
    """Summed absolute error of each group, in codes."""
    return _column_sum((codes_gM - scaled_gM).sub_(zero_M).abs_())


def _column_sum(values_gM: Tensor) -> Tensor:
    """The sum over the first dimension, by halves: in an order that the number of columns cannot change.

    Overwrites its input.
    """
    while (count := len(values_gM)) > 1:
        half = count // 2
        values_gM[:half] += values_gM[count - half :]
        values_gM = values_gM[: count - half]
    return values_gM[0]
