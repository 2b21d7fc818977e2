"""The last lines of a run: what came out, where it is, what to type next."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leantune.train.session import RunResult


def print_result(result: RunResult | None) -> int:
    """Print a finished run's numbers on rank 0; returns the exit code."""
    if result is None or os.environ.get("RANK", "0") != "0":
        return 0
    losses = f"loss {result.first_loss:.4f} -> {result.last_loss:.4f}"
    validation = f", validation loss {result.eval_loss:.4f}" if result.eval_loss is not None else ""
    why = " (stopped early: the validation loss no longer falls)" if result.ending == "early_stop" else ""
    print(f"\n{result.steps} steps in {result.seconds:.0f} s{why}: {losses}{validation}")
    print(f"{result.tokens_per_second:.0f} tokens/s, peak memory {result.peak_memory_gib:.2f} GiB")
    print(f"run folder: {result.folder}")
    print(f'next: leantune generate {result.folder} "your prompt"   or   leantune chat {result.folder}')
    return 0
