"""Encoded records: what tokenisation leaves behind, and what batches are made of."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from leantune.errors import DataError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Record:
    """One encoded record. `supervised[i]` says that token i is a target of the loss."""

    sample_id: int
    tokens: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.bool_]
    prompt_length: int


@dataclass(frozen=True)
class DataFacts:
    """What happened between the file and the tokens; printed before training and kept with the run."""

    source: str
    format: str
    template: str
    num_records: int
    num_kept: int
    num_truncated: int
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    total_tokens: int = 0
    supervised_tokens: int = 0
    longest: int = 0


@dataclass(frozen=True)
class EncodedRecords:
    """All records of a split, flat.

    tokens: int32 [total]; supervised: bool [total]; offsets: int64 [n + 1];
    prompt_lengths: int64 [n], tokens before the first supervised one;
    sample_ids: int64 [n], index of the record in its source.
    """

    tokens: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.bool_]
    offsets: IntArray
    prompt_lengths: IntArray
    sample_ids: IntArray
    facts: DataFacts

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def lengths(self) -> IntArray:
        """Tokens of each record."""
        return np.diff(self.offsets)

    def __getitem__(self, index: int) -> Record:
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Record(
            sample_id=int(self.sample_ids[index]),
            tokens=self.tokens[span],
            supervised=self.supervised[span],
            prompt_length=int(self.prompt_lengths[index]),
        )

    def save(self, path: Path) -> None:
        """Write one safetensors file; the facts go into its metadata."""
        from safetensors.numpy import save_file

        arrays = {
            "tokens": self.tokens,
            "supervised": self.supervised,
            "offsets": self.offsets,
            "prompt_lengths": self.prompt_lengths,
            "sample_ids": self.sample_ids,
        }
        save_file(arrays, path, metadata={"facts": json.dumps(asdict(self.facts))})

    @classmethod
    def load(cls, path: Path) -> EncodedRecords:
        """Read what `save` wrote; raises `DataError` if the file is not that."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                arrays: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                facts = DataFacts(**json.loads(file.metadata()["facts"]))
            return cls(**arrays, facts=facts)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is not a file of encoded records: {error}") from error
