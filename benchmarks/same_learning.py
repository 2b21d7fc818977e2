"""LoReFT beside the loop of its inventors: the same records, order, learning rates and start.

    uv run python benchmarks/same_learning.py --data alpaca_1k.json      # without --data: generated records

The Alpaca example of pyreft on SmolLM2-135M: layers 8;19, rank 4, f1+l1 untied, batches of 4, AdamW without
decay, cosine with 3 % warm-up, one epoch. The other side is a loop over
`torch.nn.utils.parametrizations.orthogonal` (tests/reference_reft.py). Both start from the same values for
each of the seeds. Printed: how far the losses of the first step are apart, and the mean loss over all records
after the epoch, as mean ± standard deviation over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from cells import Cell, build_cell
from torch import Tensor

from leantune.bases import load_base
from leantune.cli.allocator import tune_allocator
from leantune.config.schema import DataSection
from leantune.data.batches import MicroBatch, collate, epoch_windows
from leantune.data.prepare import prepare_data
from leantune.data.records import EncodedRecords
from leantune.models.source import load_tokenizer, resolve_model
from leantune.strategies.process import World
from leantune.train.forward import summed_loss
from leantune.train.optimizer import build_schedule

from measure import alpaca_like, table

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.reference_reft import learn_reference, reference_loss, reference_of

CPU = torch.device("cpu")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="JSON file of Alpaca records")
    parser.add_argument("--records", type=int, default=256)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--layers", default="8;19")
    parser.add_argument("--learning-rate", type=float, default=9e-4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def encoded(args: argparse.Namespace, folder: Path) -> EncodedRecords:
    """The records of the file, or generated ones."""
    path = args.data or str(alpaca_like(folder / "records.json", args.records))
    section = DataSection(
        train=path,
        template="alpaca",
        max_length=args.max_length,
        max_records=args.records,
        cache=False,
    )
    return prepare_data(section, load_tokenizer(resolve_model(args.model)), 0).train


def mean_over(records: EncodedRecords, size: int, loss_of: Callable[[MicroBatch], Tensor]) -> float:
    """Mean over the supervised tokens of all records of a batch's mean loss."""
    total, tokens = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(records), size):
            batch = collate(records, range(start, min(start + size, len(records))), 0)
            total += float(loss_of(batch)) * len(batch.labels)
            tokens += len(batch.labels)
    return total / tokens


def cell_loss(cell: Cell, batch: MicroBatch) -> Tensor:
    """The mean loss of a batch's labelled tokens."""
    with cell.attached.edits(batch.prompt_lengths):
        return summed_loss(cell.model, batch, cell.precision) / len(batch.labels)


def one_seed(args: argparse.Namespace, records: EncodedRecords, seed: int) -> dict[str, float]:
    """Train both sides from one start through the same batches."""
    settings = {"rank": 4, "layers": args.layers, "position": "f1+l1", "tied": False}
    world = World(0, 0, 1, CPU)
    cell = build_cell("loreft", "dense", "single", args.model, world, settings=settings, seed=seed)
    frozen = load_base("dense", resolve_model(args.model))
    reference = reference_of(cell.attached, frozen, 1, 1)
    windows = epoch_windows(records.lengths, args.batch_size, seed, 0, True)
    batches = [collate(records, window, 0) for window in windows]
    rate = build_schedule("cosine", args.learning_rate, len(batches), -(-3 * len(batches) // 100), 0.0)
    rates = [rate(step) for step in range(len(batches))]

    def mine_now() -> float:
        return mean_over(records, args.batch_size, lambda batch: cell_loss(cell, batch))

    untrained = mine_now()
    mine = [float(cell.step(batch, rate=lr)) for batch, lr in zip(batches, rates, strict=True)]
    theirs = learn_reference(reference, batches, rates)
    return {
        "first step": abs(mine[0] - theirs[0]),
        "untrained": untrained,
        "leantune": mine_now(),
        "reference": mean_over(records, args.batch_size, lambda batch: reference_loss(reference, batch)),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Run all seeds and print the table; returns its columns, a value for each seed."""
    args = arguments().parse_args(argv)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        records = encoded(args, Path(folder))
    seeds = [one_seed(args, records, seed) for seed in range(args.seeds)]
    found = {key: [seed[key] for seed in seeds] for key in seeds[0]}
    difference = [m - t for m, t in zip(found["leantune"], found["reference"], strict=True)]
    rows = [
        {"": name, "mean ± spread": spread(values)}
        for name, values in (
            ("untrained", found["untrained"]),
            ("leantune", found["leantune"]),
            ("reference", found["reference"]),
            ("leantune - reference", difference),
        )
    ]
    print(f"mean loss of {len(records)} records after an epoch, {args.seeds} seeds\n\n{table(rows)}")
    print(f"\nlosses of the first step apart by at most {max(found['first step']):.1e} (goal: 1e-6)")
    return found


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.5f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.5f}"


if __name__ == "__main__":
    tune_allocator()  # starts the process anew
    main()
