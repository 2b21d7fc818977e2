"""Answers of several models to the same prompts, side by side."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from leantune.errors import DataError
from leantune.evaluate.page import comparison_page

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Comparison:
    """Prompts (rows) and the answers of each model (columns), the first being the one compared with.

    `metadata` describes columns, e.g. {"tuned": {"method": "lora", "trained": "4.9 M"}}.
    """

    prompts: tuple[str, ...]
    columns: Mapping[str, tuple[str, ...]]
    title: str = "Answers side by side"
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    marked: bool = True

    def differs(self, column: str, row: int) -> bool:
        """Whether this answer is marked as another one than that of the first column, white space aside."""
        first = next(iter(self.columns.values()))[row]
        return self.marked and self.columns[column][row].split() != first.split()

    def num_different(self, column: str) -> int:
        """Answers of this column that differ from the first column's."""
        return sum(self.differs(column, row) for row in range(len(self.prompts)))

    def terminal(self) -> RenderableType:
        """A table for the terminal; answers that differ from the first column's are marked with ≠."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, show_lines=True)
        table.add_column("prompt", style="dim", ratio=1)
        for name in self.columns:
            facts = "".join(f"\n{key}: {value}" for key, value in self.metadata.get(name, {}).items())
            table.add_column(Text(name) + Text(facts, style="dim not bold"), ratio=1)
        for row, prompt in enumerate(self.prompts):
            cells = [Text(prompt)]
            for name, answers in self.columns.items():
                mark = Text("≠ ", style="bold yellow") if self.differs(name, row) else Text()
                cells.append(mark + Text(answers[row]))
            table.add_row(*cells)
        return table

    def markdown(self) -> str:
        """A document with one section per prompt; answers that differ from the first are marked with ≠."""
        parts = [f"# {self.title}"]
        for name, facts in self.metadata.items():
            parts.append(f"**{name}**: " + ", ".join(f"{key} {value}" for key, value in facts.items()))
        for row, prompt in enumerate(self.prompts):
            parts += [f"## {row + 1}", _fenced(prompt)]
            for name, answers in self.columns.items():
                mark = " ≠" if self.differs(name, row) else ""
                parts += [f"**{name}**{mark}", _fenced(answers[row])]
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """One HTML page that needs nothing but itself."""
        rows = [
            (prompt, [(answers[row], self.differs(name, row)) for name, answers in self.columns.items()])
            for row, prompt in enumerate(self.prompts)
        ]
        heads = [(name, self.metadata.get(name, {}), self.num_different(name)) for name in self.columns]
        return comparison_page(self.title, heads, rows)


def compare(
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    *,
    title: str = "Answers side by side",
    metadata: Mapping[str, Mapping[str, object]] | None = None,
    marked: bool = True,
) -> Comparison:
    """Put the answers of each model (name: answers in the order of the prompts) side by side.

    `marked`: point out the answers that differ from the first column's.
    Raises `DataError` if a column has more or fewer answers than there are prompts.
    """
    if not columns:
        raise DataError("there are no answers to compare; expected at least one model")
    for name, answers in columns.items():
        if len(answers) != len(prompts):
            raise DataError(
                f"{name}: {len(answers)} answers to {len(prompts)} prompts; expected one for each"
            )
    facts = {name: {k: str(v) for k, v in known.items()} for name, known in (metadata or {}).items()}
    unknown = sorted(facts.keys() - columns.keys())
    if unknown:
        raise DataError(f"metadata of {', '.join(unknown)}, but the columns are {', '.join(columns)}")
    return Comparison(tuple(prompts), {name: tuple(a) for name, a in columns.items()}, title, facts, marked)


def _fenced(text: str) -> str:
    """A code block with a fence longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
