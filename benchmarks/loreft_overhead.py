"""What training with LoReFT costs over a forward and backward of the same frozen model without it.

    uv run python benchmarks/loreft_overhead.py                     # layers 8;19, about 3 minutes
    uv run python benchmarks/loreft_overhead.py --layers all --rank 8 --position f7+l7 --tied

SmolLM2-135M, fp32, batches of Alpaca-like records; layers 8;19, rank 4, f1+l1 untied is the Alpaca example
of pyreft. One side is a whole training step: edits, loss, backward, norm, tangent, AdamW, retraction. The
other runs the same frozen model on the same batch with no interventions, and its backward ends at the lowest
edited layer too: the states after that block need a gradient, and nothing is trained. The two alternate in
one process; the figure is the ratio of processor times, with that of wall times beside it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from cells import build_cell
from torch import Tensor, nn

from leantune.cli.allocator import tune_allocator
from leantune.config.schema import DataSection
from leantune.data.batches import MicroBatch, collate, epoch_windows
from leantune.data.prepare import prepare_data
from leantune.methods import Attached
from leantune.models.anatomy import decoder_blocks
from leantune.models.precision import PRECISIONS
from leantune.models.source import load_tokenizer, resolve_model
from leantune.strategies.process import World
from leantune.train.forward import summed_loss

from measure import alpaca_like

FP32 = PRECISIONS["fp32"]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="8;19")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--position", default="f1+l1")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    return parser


def alpaca_batches(folder: Path, model: str, count: int, size: int, max_length: int) -> list[MicroBatch]:
    """Alpaca-like batches of similar lengths, as training forms them."""
    tokenizer = load_tokenizer(resolve_model(model))
    section = DataSection(
        train=str(alpaca_like(folder / "r.json", count * size)),
        template="alpaca",
        max_length=max_length,
        cache=False,
    )
    records = prepare_data(section, tokenizer, 0).train
    windows = epoch_windows(records.lengths, size, 0, 0, True)
    return [collate(records, window, 0) for window in windows if len(window) == size][:count]


class Baseline:
    """The frozen model whose backward ends behind a block, and nothing trained."""

    def __init__(self, attached: Attached) -> None:
        self.attached = attached
        self._active = False
        last = attached.frozen_blocks() - 1
        list(decoder_blocks(attached.model).values())[last].register_forward_hook(self._cut)

    def _cut(self, _block: nn.Module, _args: Any, hidden: Tensor) -> Tensor:
        return hidden.detach().requires_grad_() if self._active else hidden

    def step(self, batch: MicroBatch) -> None:
        model: Any = self.attached.model
        self._active = True
        with self.attached.disabled():
            loss = summed_loss(model, batch, FP32)
        self._active = False
        loss.backward()


def spent(step: Callable[[], None]) -> tuple[float, float]:
    """Processor and wall seconds of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - cpu, time.perf_counter() - wall


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Alternate the two and print the ratios."""
    args = arguments().parse_args(argv)
    torch.set_num_threads(args.threads)
    settings = {key: getattr(args, key) for key in ("layers", "rank", "position", "tied")}
    world = World(0, 0, 1, torch.device("cpu"))
    training = build_cell(
        "loreft", "dense", "single", args.model, world, settings=settings, learning_rate=1e-4
    )
    baseline = Baseline(training.attached)
    with tempfile.TemporaryDirectory() as folder:
        work = alpaca_batches(Path(folder), args.model, args.batches, args.batch_size, args.max_length)
    for batch in work[:1]:
        baseline.step(batch)
        training.step(batch)
    found: dict[str, list[float]] = {"processor": [], "wall": []}
    for _ in range(args.rounds):
        for batch in work:
            before = spent(lambda batch=batch: baseline.step(batch))
            trained = spent(lambda batch=batch: training.step(batch))
            after = spent(lambda batch=batch: baseline.step(batch))
            for index, values in enumerate(found.values()):
                values.append(2 * trained[index] / (before[index] + after[index]))
    ratios = {kind: statistics.median(values) for kind, values in found.items()}
    for kind, ratio in ratios.items():
        print(f"{kind} time of a training step / of the frozen pass: {ratio:.3f} (goal: at most 1.03)")
    return ratios


if __name__ == "__main__":
    tune_allocator()  # starts the process anew
    main()
