"""Equal means equal to the bit, and every difference is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from leantune.checkpoint.compare import different_in_file, same_bits
from leantune.errors import CheckpointError


def test_signed_zeros_and_nan_payloads_count_as_different() -> None:
    """torch.equal takes -0.0 for 0.0, and no NaN for itself."""
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    other = (nan.view(torch.int32) | 1).view(torch.float32)
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, other)
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bits(torch.zeros(2, 1), torch.zeros(2))


def test_tensors_that_differ_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tensors.safetensors"
    kept = {"nan": torch.tensor([float("nan")]), "same": torch.arange(3)}
    save_file({**kept, "zero": torch.tensor([0.0]), "more": torch.zeros(1)}, path)
    assert different_in_file(path, {**kept, "zero": torch.tensor([-0.0]), "lost": torch.zeros(1)}) == [
        "lost",
        "more",
        "zero",
    ]
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"tensors\.safetensors cannot be read"):
        different_in_file(path, kept)
