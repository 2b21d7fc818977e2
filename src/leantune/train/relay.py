"""Rows of metrics on their way from rank 0 to the `notify` of the process that started the ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leantune.train.events import MetricsWriter, Notify

RELAY_FILE = "LEANTUNE_RELAY_FILE"


def row_sender() -> Notify | None:
    """What rank 0 calls with each row, if the process that started it listens."""
    path = os.environ.get(RELAY_FILE)
    if not path or os.environ.get("RANK") != "0":
        return None
    return MetricsWriter(Path(path)).write


def row_receiver(path: Path, notify: Notify) -> Callable[[], None]:
    """A function that hands on the rows that have come since its last call, each once and in order."""
    position = 0

    def receive() -> None:
        nonlocal position
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(position)
            new, newline, _ = file.read().rpartition(b"\n")  # the last row may be half-written
        position += len(new) + len(newline)
        for line in new.splitlines():
            notify(_row(line))

    return receive


def _row(line: bytes) -> dict[str, Any]:
    """A row as it was before JSON, which has no NaN and no infinity; either comes back as NaN."""
    row: dict[str, Any] = json.loads(line)
    return {**row, **dict.fromkeys(row.pop("nonfinite", ()), float("nan"))}
