"""Encoded records: what tokenisation leaves behind, and what batches are made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from leantune.errors import DataError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Record:
    """One encoded record. `supervised[i]` says that token i is a target of the loss.

    `marked[i]`: token i lies between markers; `subspaces`: the active dimensions, bool [rank]. None: the
    records have no such thing.
    """

    sample_id: int
    tokens: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.bool_]
    prompt_length: int
    marked: npt.NDArray[np.bool_] | None = None
    subspaces: npt.NDArray[np.bool_] | None = None


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
    labels: list[str] = field(default_factory=list[str])  # the classes, by what `targets` counts


@dataclass(frozen=True)
class EncodedRecords:
    """All records of a split, flat. A record is one sequence, or two: a chosen and a rejected answer.

    tokens: int32 [total]; supervised: bool [total]; offsets: int64 [s + 1] for s sequences, those of a record
    side by side; prompt_lengths: int64 [s], tokens before the first supervised one;
    sample_ids: int64 [n], index of the record in its source. Only if the run uses them: marked: bool
    [total], tokens between markers; subspaces: bool [n, rank], active dimensions of each record; targets:
    int64 [n], the class of each record.
    """

    tokens: npt.NDArray[np.int32]
    supervised: npt.NDArray[np.bool_]
    offsets: IntArray
    prompt_lengths: IntArray
    sample_ids: IntArray
    facts: DataFacts
    marked: npt.NDArray[np.bool_] | None = None
    subspaces: npt.NDArray[np.bool_] | None = None
    targets: IntArray | None = None

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def lengths(self) -> IntArray:
        """Tokens of each record."""
        return self.sequence_lengths.reshape(len(self), -1).sum(axis=1)

    @property
    def sequence_lengths(self) -> IntArray:
        """Tokens of each sequence."""
        return np.diff(self.offsets)

    @property
    def sequences_per_record(self) -> int:
        """1, or 2 for pairs of answers."""
        return (len(self.offsets) - 1) // max(len(self), 1)

    def sequences_of(self, indices: Sequence[int] | IntArray) -> IntArray:
        """The numbers of the sequences of these records, record after record."""
        many = self.sequences_per_record
        return (np.asarray(indices, dtype=np.int64)[:, None] * many + np.arange(many)).reshape(-1)

    def __getitem__(self, index: int) -> Record:
        """A record; of a pair the chosen answer."""
        return self.sequence(index * self.sequences_per_record)

    def sequence(self, number: int) -> Record:
        """One sequence of a record."""
        index = number // self.sequences_per_record
        span = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        return Record(
            sample_id=int(self.sample_ids[index]),
            tokens=self.tokens[span],
            supervised=self.supervised[span],
            prompt_length=int(self.prompt_lengths[number]),
            marked=None if self.marked is None else self.marked[span],
            subspaces=None if self.subspaces is None else self.subspaces[index],
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
            "marked": self.marked,
            "subspaces": self.subspaces,
            "targets": self.targets,
        }
        arrays = {name: array for name, array in arrays.items() if array is not None}
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
