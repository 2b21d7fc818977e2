"""Parts of a ReFT subspace by name, `{formal: 0-3, sql: 4-7}`, and what records and users choose of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leantune.config.layers import parse_layers

Choice = tuple[str | int, ...]  # names, and dimensions counted from 0


@dataclass(frozen=True)
class Subspaces:
    """The dimensions 0 to rank - 1 of a subspace, and the names that some of them have together."""

    rank: int
    names: Mapping[str, tuple[int, ...]]

    @classmethod
    def read(cls, rank: int, written: Mapping[str, str | Sequence[int]]) -> Subspaces:
        """`method.subspaces` as it is written; raises `ValueError` for what cannot be meant."""
        names = dict[str, tuple[int, ...]]()
        for name, value in written.items():
            if not name.strip() or "," in name or name.strip().isdecimal():
                raise ValueError(f"{name!r} is not a name; expected a word without commas that is no number")
            try:
                names[name] = parse_layers(value) or tuple(range(rank))
                cls(rank, names).mask([name])
            except ValueError as error:
                raise ValueError(f"{name}: {str(error).replace('layer', 'dimension')}") from error
        return cls(rank, names)

    def mask(self, choice: Sequence[str | int]) -> list[bool]:
        """Which of the dimensions are chosen; raises `ValueError` for one that does not exist."""
        chosen = set[int]()
        for item in choice:
            if isinstance(item, str) and item not in self.names:
                known = ", ".join(self.names) or "none"
                raise ValueError(f"there is no subspace {item!r}; method.subspaces names {known}")
            chosen |= set(self.names[item] if isinstance(item, str) else (item,))
        outside = sorted(index for index in chosen if not 0 <= index < self.rank)
        if outside:
            raise ValueError(
                f"dimension {outside[0]} does not exist; the rank is {self.rank}: 0 to {self.rank - 1}"
            )
        return [index in chosen for index in range(self.rank)]


def read_choice(value: object) -> Choice:
    """Names and dimensions from a list of them, a single one, or a text with commas between them.

    Raises `ValueError` if it is none of these, or empty.
    """
    parts = value.split(",") if isinstance(value, str) else value
    items = list(parts) if isinstance(parts, list | tuple) else [parts]  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    choice = tuple(_item(item) for item in items)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if not choice:
        raise ValueError("no subspace is listed; leave it out for all dimensions")
    return choice


def _item(value: object) -> str | int:
    if isinstance(value, str) and value.strip():
        return int(value) if value.strip().isdecimal() else value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} is neither the name of a subspace nor a dimension")
