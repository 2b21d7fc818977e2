"""Whether the disk gives back what memory holds, to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from leantune.errors import CheckpointError


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal dtype, shape and bits, so that NaN equals the same NaN and 0.0 differs from -0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    one, other = (tensor.detach().cpu().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(one, other)


def different_in_file(path: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that a safetensors file lacks, has besides these, or holds with other bits.

    Raises `CheckpointError` if the file cannot be read.
    """
    with reading(path), safe_open(path, "pt") as file:
        different = sorted(tensors.keys() ^ set(file.keys()))
    for name in tensors.keys() - set(different):
        # Opened anew for each tensor: pages of a mapped file count as memory until it is closed.
        with reading(path), safe_open(path, "pt") as file:
            if not same_bits(tensors[name], file.get_tensor(name)):
                different.append(name)
    return sorted(different)


def refuse_different(path: Path, different: list[str]) -> None:
    """Raise `CheckpointError` if anything that was to become `path` differs from memory."""
    if different:
        raise CheckpointError(
            f"{path} was not kept: read back from disk, {', '.join(sorted(different)[:5])}"
            f"{' and others' if len(different) > 5 else ''} differ from memory; check the disk"
        )


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a file is read into a `CheckpointError` naming it."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
