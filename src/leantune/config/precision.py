"""The precisions of a run as one table of plain words; help and documents print it."""

from __future__ import annotations

from typing import NamedTuple


class PrecisionRow(NamedTuple):
    """The types that a value of `train.precision` stands for."""

    weights: str
    trained: str
    compute: str
    buffers: str
    note: str


PRECISIONS = {
    "fp32": PrecisionRow("fp32", "fp32", "fp32", "fp32", "the reference; auto on a CPU"),
    "bf16": PrecisionRow(
        "bf16", "bf16", "bf16", "bf16", "least memory; small updates of what is trained round away"
    ),
    "bf16_mixed": PrecisionRow(
        "bf16", "fp32", "bf16 (autocast)", "bf16", "auto on a GPU that computes in bf16"
    ),
    "bf16_fp32_buffers": PrecisionRow(
        "bf16", "bf16", "bf16 (autocast)", "fp32", "as bf16, with all tables of the model exact"
    ),
    "fp16_mixed": PrecisionRow(
        "fp16",
        "fp32",
        "fp16 (autocast)",
        "fp16",
        "auto on other GPUs; a dynamic loss scale",
    ),
}

HEADINGS = ("precision", "frozen weights", "trained", "compute", "buffers", "")

REMARKS = (
    "Rotary tables are fp32 in every row, and so is each buffer that a model itself asks for in fp32.",
    "The codes and block scales of a packed base (nf4, hqq) are never cast.",
    "With method full all weights are trained weights.",
    "Interventions (loreft) are fp32 in every row: 16 bits cannot keep their factors orthonormal.",
)


def precision_table_text() -> str:
    """The table in columns, for a terminal."""
    rows = [HEADINGS, *((name, *row) for name, row in PRECISIONS.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*(line.rstrip() for line in lines), *REMARKS])


def precision_table_markdown() -> str:
    """The table and its remarks for a document."""
    rows = [HEADINGS, ("---",) * len(HEADINGS), *((f"`{name}`", *row) for name, row in PRECISIONS.items())]
    table = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*table, "", *REMARKS])
