"""Tensors copied from file to file as bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from leantune.checkpoint.stream import Copied, stored_tensors, write_sharded
from leantune.errors import CheckpointError


def source_file(folder: Path) -> Path:
    """Values of several widths, an odd count, a scalar, and nothing at all."""
    path = folder / "source.safetensors"
    tensors = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(5, 3).to(torch.bfloat16),
        "wide": torch.randn(2, 2, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, path)
    return path


def test_bytes_dtypes_and_shapes_arrive(tmp_path: Path) -> None:
    path = source_file(tmp_path)
    (tmp_path / "out").mkdir()
    write_sharded(tmp_path / "out", {name: Copied(t) for name, t in stored_tensors(path).items()}, 10**6)
    again = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in load_file(path).items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor)
    starts = {
        n: t.start % t.num_bytes
        for n, t in stored_tensors(tmp_path / "out" / "model.safetensors").items()
        if n == "scalar"
    }
    assert starts == {"scalar": 0}, "values must start at a multiple of their size"


def test_zeros_have_the_shape_and_dtype_of_what_they_replace(tmp_path: Path) -> None:
    stored = stored_tensors(source_file(tmp_path))
    (tmp_path / "out").mkdir()
    write_sharded(tmp_path / "out", {"z": Copied(stored["half"], zero=True)}, 10**6)
    again = load_file(tmp_path / "out" / "model.safetensors")["z"]
    assert (again.dtype, again.shape, int(again.count_nonzero())) == (torch.bfloat16, (5, 3), 0)


def test_a_tensor_larger_than_a_file_gets_its_own(tmp_path: Path) -> None:
    stored = stored_tensors(source_file(tmp_path))
    (tmp_path / "out").mkdir()
    copies = {name: Copied(stored[name]) for name in ("bytes", "wide", "scalar", "half")}
    write_sharded(tmp_path / "out", copies, 10)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"].values()) == [f"model-{i:05}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert index["metadata"]["total_size"] == 3 + 32 + 4 + 30
    for name, file in index["weight_map"].items():
        assert list(load_file(tmp_path / "out" / file)) == [name]


def test_a_truncated_source_is_an_error_not_a_short_tensor(tmp_path: Path) -> None:
    path = source_file(tmp_path)
    stored = stored_tensors(path)
    path.write_bytes(path.read_bytes()[:-20])
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="truncated"):
        write_sharded(tmp_path / "out", {name: Copied(tensor) for name, tensor in stored.items()}, 10**6)


@pytest.mark.parametrize("content", [b"", b"\x05\0\0\0\0\0\0\0{oops", b"\xff" * 16])
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors cannot be read"):
        stored_tensors(path)
