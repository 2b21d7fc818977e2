"""Where the output of a frozen prefix is kept between epochs: in memory, or in files of the run folder.

A store holds tensors by name, up to `limit` bytes. When it is full nothing more is taken in, and nothing is
thrown out: every micro-batch comes once an epoch, so all are worth the same.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from leantune.checkpoint.atomic import clean_stale, remove_folder, write_file
from leantune.errors import CheckpointError

_TENSOR = "hidden"
_SUFFIX = ".safetensors"


class Store(Protocol):
    """Tensors on the CPU by name."""

    limit: int

    def read(self, name: str) -> Tensor | None:
        """The tensor of this name; None if it is not there, or not what was written."""
        ...

    def write(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor, if there is room for it."""
        ...


class MemoryStore:
    """In the memory of this rank."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._tensors: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    def write(self, name: str, tensor: Tensor) -> None:
        if name not in self._tensors and self.size + tensor.nbytes <= self.limit:
            self._tensors[name] = tensor
            self.size += tensor.nbytes


class DiskStore:
    """In one file a tensor. Ranks and later processes may share the folder: files are whole or not there.

    `key` says what the tensors belong to; a file with another one, or with content that is not what was
    written, counts as missing and is written anew.
    """

    def __init__(self, folder: Path, key: str, limit: int, used: int = 0) -> None:
        self.folder = folder
        self.key = key
        self.limit = limit
        self.size = used

    def read(self, name: str) -> Tensor | None:
        path = self._path(name)
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                facts, tensor = file.metadata() or {}, file.get_tensor(_TENSOR)
        except (OSError, SafetensorError):
            return None
        expected = {"key": self.key, "crc32": _checksum(tensor)}
        return tensor if facts == expected else None

    def write(self, name: str, tensor: Tensor) -> None:
        if self.size + tensor.nbytes > self.limit:
            return
        tensor = tensor.contiguous()
        data = save({_TENSOR: tensor}, {"key": self.key, "crc32": _checksum(tensor)})
        try:
            write_file(self._path(name), data)
        except CheckpointError:  # the disk is full: go on without what is not stored
            self.limit = self.size
        else:
            self.size += tensor.nbytes

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_SUFFIX}"


def prepare_folder(parent: Path, key: str) -> Path:
    """The folder below `parent` for files of this key; what other keys have left is deleted.

    Only one process may call this, before others use the folder.
    """
    folder = parent / key
    folder.mkdir(parents=True, exist_ok=True)
    for other in parent.iterdir():
        if other != folder:
            remove_folder(other)
    clean_stale(folder)
    return folder


def used_bytes(folder: Path) -> int:
    """What the files of a folder take."""
    return sum(path.stat().st_size for path in folder.glob(f"*{_SUFFIX}"))


def _checksum(tensor: Tensor) -> str:
    return f"{zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data):08x}"
