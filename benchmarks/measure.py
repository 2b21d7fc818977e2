"""What the benchmarks share: memory readings, records of Alpaca's shape, one child process a measurement."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WORDS = [
    *("time", "year", "people", "way", "day", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *(
        "question",
        "work",
        "government",
        "number",
        "night",
        "point",
        "home",
        "water",
        "room",
        "mother",
        "area",
    ),
    *("money", "story", "fact", "month", "study", "book", "eye", "job", "word", "business", "issue", "side"),
]


def status_kib(field: str) -> int:
    """A line of /proc/self/status in KiB, such as VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise KeyError(field)


def reset_peak() -> int:
    """Forget the highest resident size so far; returns the present one in KiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_kib("VmRSS")


def alpaca_like(path: Path, num_records: int, seed: int = 0) -> Path:
    """Write records whose lengths are spread as Alpaca's are: short questions, long-tailed answers."""
    draw = random.Random(seed)

    def text(words: float) -> str:
        return " ".join(draw.choices(_WORDS, k=max(2, int(words)))).capitalize() + "."

    records = [
        {
            "instruction": text(draw.lognormvariate(2.4, 0.4)),
            "input": text(draw.lognormvariate(2.7, 0.7)) if draw.random() < 0.35 else "",
            "output": text(min(380.0, draw.lognormvariate(4.5, 0.9))),
        }
        for _ in range(num_records)
    ]
    path.write_text(json.dumps(records))
    return path


def child(script: str, arguments: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run `script arguments` in a fresh process; its last line of output is the JSON that is returned."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table."""
    keys = list(rows[0])
    cells = [[f"{row[k]:.3g}" if isinstance(row[k], float) else str(row[k]) for k in keys] for row in rows]
    lines = [keys, ["---"] * len(keys), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
