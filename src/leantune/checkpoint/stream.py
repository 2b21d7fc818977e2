"""Copying tensors between safetensors files byte by byte: no tensor is ever built, no model is ever held.

A safetensors file is the length of its header (8 bytes, little endian), a JSON header with dtype,
shape and data offsets of each tensor, and the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from leantune.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_CHUNK = 2**22  # bytes copied at a time


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in a safetensors file; `start` is the offset of its first byte in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Copied:
    """A tensor to be written: a copy of `source`, or zeros of its shape and dtype."""

    source: StoredTensor
    zero: bool = False

    def chunks(self) -> Iterator[bytes]:
        """The data, a few MiB at a time. All bits zero is the number zero in every format."""
        left = self.source.num_bytes
        with self.source.path.open("rb") as file:
            file.seek(self.source.start)
            while left > 0:
                size = min(_CHUNK, left)
                data = bytes(size) if self.zero else file.read(size)
                if len(data) != size:
                    raise CheckpointError(f"{self.source.path} is truncated; copy or download it again")
                yield data
                left -= size


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name; raises `CheckpointError` if its header cannot be read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {
            name: StoredTensor(
                path,
                entry["dtype"],
                tuple(entry["shape"]),
                8 + length + entry["data_offsets"][0],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error!r}") from error


def write_sharded(folder: Path, tensors: Mapping[str, Copied], max_bytes: int) -> None:
    """Write tensors into one file, or into several of at most `max_bytes` of data with an index.

    A tensor larger than that gets a file of its own. Every tensor is read back and compared:
    raises `CheckpointError` if the disk gives back something else.
    """
    shards = _shards(tensors, max_bytes)
    names = [
        SINGLE_FILE if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        for i in range(len(shards))
    ]
    for name, shard in zip(names, shards, strict=True):
        part = {key: tensors[key] for key in shard}
        with (folder / name).open("xb") as file:
            _write(file, part)
        _compare(folder / name, part)
    if len(shards) > 1:
        total = sum(tensor.source.num_bytes for tensor in tensors.values())
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Mapping[str, Copied], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.source.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.source.num_bytes
    return shards


def _write(file: IO[bytes], tensors: Mapping[str, Copied]) -> None:
    # Widest values first, so that each tensor starts at a multiple of its value's size.
    order = sorted(tensors, key=lambda name: -_value_size(tensors[name].source))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        source = tensors[name].source
        offsets = [offset, offset + source.num_bytes]
        header[name] = {"dtype": source.dtype, "shape": source.shape, "data_offsets": offsets}
        offset += source.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        for chunk in tensors[name].chunks():
            file.write(chunk)


def _value_size(tensor: StoredTensor) -> int:
    count = math.prod(tensor.shape)
    return tensor.num_bytes // count if count else 0


def _compare(path: Path, tensors: Mapping[str, Copied]) -> None:
    again = stored_tensors(path)
    for name, tensor in tensors.items():
        same = again[name].dtype == tensor.source.dtype and again[name].shape == tensor.source.shape
        pairs = zip(tensor.chunks(), Copied(again[name]).chunks(), strict=True)
        if not same or any(expected != found for expected, found in pairs):
            raise CheckpointError(
                f"{path}: {name} reads back differently from what was written; check the disk"
            )
