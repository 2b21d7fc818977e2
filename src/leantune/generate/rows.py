"""The rows of a batch that differ in everything: what each asks for, and the pieces of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from leantune.errors import ConfigError
from leantune.generate.sampling import Sampling

Finish = Literal["stop", "length", "cancelled"]


@dataclass(eq=False)
class Row:
    """A prompt, and how it is answered. Another thread may set `cancelled`: the row ends with its next token.

    The answer ends before the first of `stop_token_ids` and `stop_strings`. adapter: the one that acts, of
    several; strength, subspaces and generation: as in `edits.Asked`; marked: the tokens between markers.
    """

    tokens: Sequence[int]
    sampling: Sampling
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    adapter: str | None = None
    strength: float | None = None
    subspaces: Tensor | None = None
    generation: str | None = None
    marked: Sequence[bool] = ()
    cancelled: bool = False

    def __post_init__(self) -> None:
        s = self.sampling
        if s.num_beams != 1 or s.repetition_penalty != 1:
            raise ConfigError(
                f"num_beams {s.num_beams} and repetition_penalty {s.repetition_penalty} cannot be used in a "
                "batch of different rows; both must be 1"
            )


@dataclass(frozen=True)
class Piece:
    """More text of the answer of row `row`, which has `num_tokens` so far; `finish` with its last piece."""

    row: int
    text: str
    num_tokens: int
    finish: Finish | None = None
