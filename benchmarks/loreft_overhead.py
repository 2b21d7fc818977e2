"""What LoReFT's interventions on all layers cost over the same forward and backward without them.

    uv run python benchmarks/loreft_overhead.py            # about 3 minutes on 2 cores

SmolLM2-135M, fp32, 2 threads, batches of Alpaca-like records. The baseline runs the same
frozen model on the same batches with a trainable offset after the embeddings, so that its
backward goes through all layers too. The two alternate in one process; the figure is the
ratio of their median processor times per step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leantune.bases import load_base
from leantune.cli.allocator import tune_allocator
from leantune.config.schema import DataSection
from leantune.data.batches import MicroBatch, collate, epoch_windows
from leantune.data.prepare import prepare_data
from leantune.methods import attach
from leantune.models.source import load_tokenizer, resolve_model
from leantune.train.forward import summed_loss

from measure import alpaca_like


def batches(folder: Path, count: int, size: int) -> list[MicroBatch]:
    """Alpaca-like batches of similar lengths, as training forms them."""
    tokenizer = load_tokenizer(resolve_model("demo"))
    section = DataSection(
        train=str(alpaca_like(folder / "r.json", count * size)), template="alpaca", max_length=512
    )
    records = prepare_data(section, tokenizer, 0).train
    windows = epoch_windows(records.lengths, size, 0, 0, True)
    return [collate(records, window, 0) for window in windows if len(window) == size][:count]


def spent(step: Callable[[], Any]) -> tuple[float, float]:
    """Processor and wall seconds of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    """Alternate the two and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tune_allocator()
    torch.set_num_threads(2)
    device = torch.device("cpu")
    model = load_base("dense", resolve_model("demo"), dtype=torch.float32, device=device).train()
    offset = nn.Parameter(torch.zeros(model.config.hidden_size))
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _m, _a, out: out + offset)
    attached = attach("loreft", model, {"rank": 8, "layers": "all", "position": "f7+l7"}, seed=0)

    def without(batch: MicroBatch) -> None:
        with attached.disabled():
            summed_loss(model, batch, False).backward()

    def with_interventions(batch: MicroBatch) -> None:
        with attached.edits(batch.prompt_lengths):
            summed_loss(model, batch, False).backward()

    ratios: dict[str, list[float]] = {"processor": [], "wall": []}
    with tempfile.TemporaryDirectory() as folder:
        work = batches(Path(folder), args.batches, args.batch_size)
    for batch in work[:2]:
        without(batch)
        with_interventions(batch)
    for _ in range(args.rounds):
        for batch in work:
            base = spent(lambda batch=batch: without(batch))
            edited = spent(lambda batch=batch: with_interventions(batch))
            again = spent(lambda batch=batch: without(batch))
            for index, kind in enumerate(ratios):
                ratios[kind].append(2 * edited[index] / (base[index] + again[index]))
    for kind, values in ratios.items():
        print(
            f"{kind} time with interventions / without: {statistics.median(values):.3f} (goal: at most 1.05)"
        )


if __name__ == "__main__":
    main()
