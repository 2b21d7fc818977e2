"""Filling a built model from its checkpoint, with just the rows that this rank holds, packed as they come."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from leantune.bases.building import BuiltBase, Slot, build_base, check_shape
from leantune.errors import ModelError
from leantune.models.empty import materialise
from leantune.models.packed import PackedLinear
from leantune.models.precision import PRECISIONS, Precision
from leantune.models.shards import gather_rows, local_rows
from leantune.models.source import ModelSource
from leantune.models.vocabulary import Growth
from leantune.ops.dora import row_norms

CPU = torch.device("cpu")
_SLICE_VALUES = 2**21  # values of a weight that are packed or measured at a time: 8 MiB in fp32


class RowNorms(NamedTuple):
    """Row norms of a linear layer, float32 [out]: of the checkpoint's weight, and of it as it is stored."""

    unquantised: Tensor
    stored: Tensor


def load_base(
    name: str,
    source: ModelSource,
    *,
    precision: Precision = PRECISIONS["fp32"],
    device: torch.device = CPU,
    attention: str = "auto",
    settings: Mapping[str, Any] | None = None,
    growth: Growth | None = None,
) -> PreTrainedModel:
    """A frozen model on `device` with its weights stored as the base `name` says, ready for use."""
    base = build_base(name, source, precision, settings=settings, attention=attention, growth=growth)
    materialise(base.model, device)
    fill(base, device)
    return base.model


@torch.no_grad()
def fill(
    base: BuiltBase, device: torch.device, norms_of: Collection[nn.Module] = ()
) -> dict[nn.Module, RowNorms]:
    """Read this rank's rows of every weight, packing as they come; `device` is where packing computes.

    Returns the row norms of the linear layers in `norms_of`. A collective where parameters are sharded:
    every rank calls it. Raises `ModelError` for a shape that does not fit, a value beyond fp16, or
    weights that are tied in the model but differ in the checkpoint.
    """
    wanted = set(norms_of)
    norms: dict[nn.Module, RowNorms] = {}
    with base.weights.files.reading():
        for slot in base.slots:
            found: RowNorms | None
            if isinstance(slot.module, PackedLinear) and slot.attribute == "weight":
                found = _fill_packed(base, slot, slot.module, device, slot.module in wanted)
            else:
                found = _fill_dense(base, slot, slot.attribute == "weight" and slot.module in wanted)
            if found is not None:
                norms[slot.module] = found
        _check_ties(base)
    base.weights.forget()
    return norms


def _fill_dense(base: BuiltBase, slot: Slot, with_norms: bool) -> RowNorms | None:
    target: Tensor = getattr(slot.module, slot.attribute)
    rows = local_rows(target)
    if slot.source is None:
        rows.local.zero_()
        return None
    shape = check_shape(base, slot)
    if target.ndim == 0:
        rows.local.copy_(base.weights.whole(slot.source))
    elif rows.local.numel():
        start, stop = min(rows.start, shape[0]), min(rows.stop, shape[0])
        rows.local[: stop - start].copy_(base.weights.rows(slot.source, start, stop))
        if rows.stop > shape[0]:
            rows.local[stop - start :] = _mean_row(base, slot).to(rows.local)
    if rows.local.dtype == torch.float16:
        _check_fp16(rows.local, slot)
    if not with_norms:
        return None
    if isinstance(slot.module, nn.Linear):
        local = _joined([row_norms(part) for part in _slices(rows.local)], rows.local)
        whole = gather_rows(target, local)
    else:  # a row of the matrix is a column of the tensor, spread over all ranks: read it once more
        columns = _read_rows(base, slot, 0, target.shape[1], transposed=True)
        whole = torch.cat([row_norms(part.to(target.dtype)) for part in columns])
    return RowNorms(whole, whole)


def _fill_packed(
    base: BuiltBase, slot: Slot, layer: PackedLinear, device: torch.device, with_norms: bool
) -> RowNorms | None:
    assert slot.source is not None
    check_shape(base, slot)
    targets: dict[str, Tensor] = {name: getattr(layer, name) for name in layer.packed_names}
    first = next(iter(targets.values()))
    rows = local_rows(first)
    later: dict[str, list[Tensor]] = {name: [] for name in layer.unfinished()}
    norms: list[Tensor] = []
    at = 0
    for part in _read_rows(base, slot, rows.start, rows.stop, layer.transposed):
        part = part.to(device)
        for name, value in layer.pack(part).items():
            if name in later:
                later[name].append(value)
            else:
                local_rows(targets[name]).local[at : at + len(part)].copy_(value)
        if with_norms:
            norms.append(row_norms(part))
        at += len(part)
    refined = _finish(layer, later, targets, first, device) if later else {}
    if not with_norms:
        return None
    stored = [row_norms(chunk) for chunk in _unpacked(layer, targets, refined, device)]
    return RowNorms(*(gather_rows(first, _joined(column, first)) for column in (norms, stored)))


def _finish(
    layer: PackedLinear,
    later: Mapping[str, list[Tensor]],
    targets: Mapping[str, Tensor],
    like: Tensor,
    device: torch.device,
) -> dict[str, Tensor]:
    """What depends on the whole matrix: gathered, computed on every rank, cut to this rank's rows."""
    template = layer.pack(torch.zeros(1, layer.in_features, device=device))
    whole = {
        name: gather_rows(like, torch.cat([template[name][:0], *parts])) for name, parts in later.items()
    }
    finished = layer.finish(whole)
    for name, value in finished.items():
        if name in targets:
            rows = local_rows(targets[name])
            rows.local.copy_(value[rows.start : rows.stop])
        else:
            setattr(layer, name, value)
    return layer.refined(finished)


def _unpacked(
    layer: PackedLinear, targets: Mapping[str, Tensor], refined: Mapping[str, Tensor], device: torch.device
) -> Iterator[Tensor]:
    """This rank's rows as the layer computes with them, float32, a slice at a time."""
    rows = {name: local_rows(target) for name, target in targets.items()}
    first = next(iter(rows.values()))
    step = max(1, _SLICE_VALUES // layer.in_features)
    for at in range(0, len(first.local), step):
        part = {name: held.local[at : at + step].to(device) for name, held in rows.items()}
        part |= {n: v[first.start + at : first.start + at + len(part[n])] for n, v in refined.items()}
        yield layer.unpack(part)


def _check_ties(base: BuiltBase) -> None:
    """A checkpoint may hold a tied weight twice, but not two different ones: one would silently be lost."""
    firsts: dict[int, str] = {}
    for name, tensor in base.model.state_dict(keep_vars=True).items():
        first = firsts.setdefault(id(tensor), name) if name in base.weights else name
        if first == name:
            continue
        rows, held = local_rows(tensor), base.weights.shape(name)[0]
        for at, stop in _spans(min(rows.start, held), min(rows.stop, held), tensor.shape[1:]):
            if not torch.equal(base.weights.rows(first, at, stop), base.weights.rows(name, at, stop)):
                raise ModelError(
                    f"model.name: {base.weights.files.source.name}: {first} and {name} differ in the "
                    "checkpoint, but are one weight in this model; set tie_word_embeddings to false in its "
                    "config.json"
                )


def _spans(start: int, stop: int, row_shape: torch.Size) -> Iterator[tuple[int, int]]:
    """Rows `start` to `stop` of a tensor, a slice at a time."""
    step = max(1, _SLICE_VALUES // max(1, math.prod(row_shape)))
    return ((at, min(at + step, stop)) for at in range(start, stop, step))


def _mean_row(base: BuiltBase, slot: Slot) -> Tensor:
    """The mean of all rows of a weight of the checkpoint, float64; read a slice at a time."""
    assert slot.source is not None
    shape = base.weights.shape(slot.source)
    total = torch.zeros(shape[1:], dtype=torch.float64)
    step = max(1, _SLICE_VALUES // math.prod(shape[1:]))
    for at in range(0, shape[0], step):
        total += base.weights.rows(slot.source, at, min(at + step, shape[0])).sum(0, dtype=torch.float64)
    return total / shape[0]


def _read_rows(base: BuiltBase, slot: Slot, start: int, stop: int, transposed: bool) -> Iterator[Tensor]:
    """Rows of the matrix [out, in] in float32, a slice at a time."""
    assert slot.source is not None
    shape = base.weights.shape(slot.source)
    step = max(1, _SLICE_VALUES // shape[0 if transposed else 1])
    for at in range(start, stop, step):
        part = base.weights.rows(slot.source, at, min(at + step, stop), columns=transposed)
        yield (part.t() if transposed else part).to(torch.float32).contiguous()


def _slices(matrix: Tensor) -> Iterator[Tensor]:
    step = max(1, _SLICE_VALUES // matrix.shape[1])
    return (matrix[at : at + step] for at in range(0, len(matrix), step))


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([torch.zeros(0, device=like.device), *parts])


def _check_fp16(local: Tensor, slot: Slot) -> None:
    if not bool(torch.isfinite(local).all()):
        raise ModelError(
            f"train.precision: fp16_mixed: {slot.name} has values beyond the range of fp16 (65504); "
            "use bf16_mixed or fp32"
        )
