"""The tensors of one pyreft intervention, read as ours and written as pyreft's.

A payload is a state dict: that of LoReFT holds its orthonormal factor as it is, those of the other classes
hold the two tensors of torch's orthogonal parametrisation. Legend: d hidden size, r rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from leantune.errors import CheckpointError
from leantune.ops.intervention import KINDS, ORTHONORMAL

_ORIGINAL = "rotate_layer.parametrizations.weight.original"
_BASE = "rotate_layer.parametrizations.weight.0.base"
_SIZES = ("embed_dim", "interchange_dim")  # buffers that repeat d
_UNUSED_BIAS = "proj_layer.bias"  # of NodiReFT: its formula has no use for it
_SOURCE = {"learned_source.weight": "weight", "learned_source.bias": "bias"}
# pyreft's name -> ours
_NAMES: dict[str, dict[str, str]] = {
    "loreft": {"rotate_layer": "rotation", "weight": "weight", "bias": "bias"},
    "noreft": {"proj_layer.weight": "projection", "proj_layer.bias": "projection_bias", **_SOURCE},
    "consreft": {"rotate_layer": "rotation", "learned_source": "constant"},
    "lobireft": {"rotate_layer": "rotation", "learned_source": "constant"},
    "direft": {"rotate_layer": "rotation", **_SOURCE},
    "nodireft": {"proj_layer.weight": "projection", **_SOURCE},
}
_OPTIONAL = {"projection_bias"}
# A factor that was stored as bf16 is off by 2e-4 at d = 64 and less in wider models, a wrong one by 1.
_ORTHONORMAL_TO = 1e-3


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.bin` file; nothing but tensors is unpickled.

    Raises `CheckpointError` for a file that is broken or holds anything else.
    """
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        # torch's own words end in advice to unpickle it after all.
        refused = isinstance(error, pickle.UnpicklingError)
        told = (str(error) or type(error).__name__).splitlines()[0]
        reason = "it is damaged, or holds more than tensors" if refused else told
        raise CheckpointError(
            f"{path} is no file of tensors alone, and is not unpickled: {reason}"
        ) from error
    named = cast("dict[str, Any]", state if isinstance(state, dict) else {"": state})
    if not all(name and isinstance(tensor, Tensor) for name, tensor in named.items()):
        raise CheckpointError(f"{path} holds something else than named tensors; expected a state dict")
    return named


def kinds_of(state: Mapping[str, Tensor]) -> list[str]:
    """The kinds whose names a state dict has; two kinds share their names with another one."""
    names = set(_with_rotation_name(state)) - set(_SIZES) - {_UNUSED_BIAS}
    return [kind for kind in KINDS if names == set(_NAMES[kind]) - {_UNUSED_BIAS}]


def parameters_from(kind: str, state: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Our fp32 parameters of a payload (see `methods.interventions.Intervention`).

    Raises `CheckpointError` for names or shapes that are not those of the kind, values that fp32 cannot
    hold, or a factor that is not orthonormal.
    """
    names = _NAMES[kind]
    tensors = {name: _fp32(name, tensor, path) for name, tensor in state.items() if name not in _SIZES}
    if kind == "nodireft":
        tensors.pop(_UNUSED_BIAS, None)
    if _ORIGINAL in tensors:
        tensors["rotate_layer"] = _rotation(tensors.pop(_ORIGINAL), tensors.pop(_BASE, None), path)
    needed = {name for name, own in names.items() if own not in _OPTIONAL}
    if not needed <= tensors.keys() <= names.keys():
        raise CheckpointError(
            f"{path} has the tensors {', '.join(sorted(state))}; those of {kind} are {', '.join(names)}"
        )
    parameters = {names[name]: tensor.contiguous() for name, tensor in tensors.items()}
    dim, rank = _check_shapes(parameters, path)
    for size in set(_SIZES) & state.keys():
        if state[size].tolist() != dim:
            raise CheckpointError(f"{path}: {size} is {state[size].tolist()}, but its tensors are {dim} wide")
    if kind in ORTHONORMAL:
        _check_orthonormal(parameters["rotation"], rank, path)
    return parameters


def payload_of(kind: str, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict that pyreft's class of this kind would save."""
    names = {own: name for name, own in _NAMES[kind].items()}
    state = {names[own]: tensor for own, tensor in parameters.items()}
    if kind == "loreft":
        return state
    if "rotate_layer" in state:
        state[_ORIGINAL], state[_BASE] = _orthogonal_state(state.pop("rotate_layer"))
    return {**{size: torch.tensor(sizes_of(parameters)[0]) for size in _SIZES}, **state}


def sizes_of(parameters: Mapping[str, Tensor]) -> tuple[int, int]:
    """(d, r) of the parameters of an intervention: of its rotation [d, r] or its projection [r, d]."""
    factor = parameters["rotation"].mT if "rotation" in parameters else parameters["projection"]
    return (factor.shape[1], factor.shape[0]) if factor.ndim == 2 else (0, 0)


def orthogonal_matrix(original_dr: Tensor, base_dd: Tensor | None) -> Tensor:
    """The matrix that a state of `torch.nn.utils.parametrizations.orthogonal` stands for, [d, r].

    Computed as torch does with its default map: the matrix exponential if it is square, else a product of
    Householder reflections; then rotated by the base, unless there is none. To the bit only if the tensors
    lie in memory as torch had them, which decides the order of sums.
    """
    dim, rank = original_dr.shape
    linalg: Any = torch.linalg  # it comes without types
    if dim == rank:
        lower = original_dr.tril()
        frame: Tensor = linalg.matrix_exp(lower - lower.mT)
    else:
        lower = original_dr.tril(diagonal=-1)
        frame = linalg.householder_product(lower, 2.0 / (1.0 + (lower * lower).sum(dim=-2)))
        frame = frame * original_dr.diagonal().int()
    return frame if base_dd is None else base_dd @ frame


def _orthogonal_state(rotation_dr: Tensor) -> tuple[Tensor, Tensor]:
    """(original, base) of a parametrisation that stands for exactly this matrix: it is part of the base."""
    dim, rank = rotation_dr.shape
    linalg: Any = torch.linalg
    full: Tensor = linalg.qr(rotation_dr, mode="complete").Q
    base = torch.cat([rotation_dr, full[:, rank:]], dim=1)
    original = torch.zeros(dim, rank)
    original.diagonal().fill_(-1.0)
    return original, base


def _rotation(original: Tensor, base: Tensor | None, path: Path) -> Tensor:
    dim, rank = original.shape if original.ndim == 2 else (0, 0)
    if not 0 < rank <= dim or (base is not None and base.shape != (dim, dim)):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (original, base) if tensor is not None)
        raise CheckpointError(
            f"{path}: an orthogonal parametrisation of shapes {shapes}, expected (d, r), (d, d)"
        )
    return orthogonal_matrix(original, base)


def _with_rotation_name(state: Mapping[str, Tensor]) -> set[str]:
    names = set(state)
    return (names - {_ORIGINAL, _BASE}) | {"rotate_layer"} if _ORIGINAL in names else names


def _fp32(name: str, tensor: Tensor, path: Path) -> Tensor:
    if not tensor.is_floating_point():
        raise CheckpointError(f"{path}: {name} is {tensor.dtype}, expected floating-point values")
    single = tensor.float()
    if not torch.equal(single.to(tensor.dtype), tensor):
        raise CheckpointError(
            f"{path}: {name} ({tensor.dtype}) has values that are NaN, or too fine for fp32"
        )
    return single


def _check_shapes(parameters: Mapping[str, Tensor], path: Path) -> tuple[int, int]:
    """(d, r), of which all shapes are made."""
    dim, rank = sizes_of(parameters)
    wide = {"rotation": (dim, rank), "projection": (rank, dim), "weight": (rank, dim)}
    for name, tensor in parameters.items():
        expected = wide.get(name, (rank,))
        if tuple(tensor.shape) != expected:
            raise CheckpointError(f"{path}: {name} is {tuple(tensor.shape)}, expected {expected}")
    return dim, rank


def _check_orthonormal(rotation_dr: Tensor, rank: int, path: Path) -> None:
    frame = rotation_dr.double()
    deviation = float((frame.mT @ frame - torch.eye(rank, dtype=torch.float64)).abs().max())
    if not deviation <= _ORTHONORMAL_TO:
        raise CheckpointError(
            f"{path}: the columns of its rotation are not orthonormal (largest deviation {deviation:.1e}, "
            f"allowed {_ORTHONORMAL_TO:.0e}); it is no factor of a ReFT intervention"
        )
