"""How much faster an epoch is when the frozen blocks below LoReFT's layers are not computed again.

    uv run python benchmarks/frozen_prefix.py            # about 5 minutes on 2 cores

SmolLM2-135M, fp32, LoReFT at layers 24 to 29 of 30, batches of Alpaca-like records. In one process each
micro-batch takes an optimizer step with its prefix computed (as without the cache) and one with its prefix
from memory (as in every epoch but the first), in turns; losses must be equal to the bit. The figure is the
ratio of processor times; beside it stands what the saved operations promise: FLOPs of matrix products.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from cells import Cell, build_cell, weights

from leantune.cli.allocator import tune_allocator
from leantune.config.schema import DataSection
from leantune.data.batches import MicroBatch, collate, epoch_windows
from leantune.data.prepare import prepare_data
from leantune.models.anatomy import decoder_blocks, linears, output_head, text_config
from leantune.models.prefix import FrozenPrefix
from leantune.models.source import load_tokenizer, resolve_model
from leantune.strategies.process import World
from leantune.train.forward import summed_loss
from leantune.train.prefix import PrefixCache
from leantune.train.prefix_store import MemoryStore

from measure import alpaca_like

CPU = torch.device("cpu")


def batches(count: int, size: int) -> list[MicroBatch]:
    """Alpaca-like batches of similar lengths, as training forms them."""
    tokenizer = load_tokenizer(resolve_model("demo"))
    with tempfile.TemporaryDirectory() as folder:
        file = alpaca_like(Path(folder) / "records.json", count * size)
        section = DataSection(train=str(file), template="alpaca", max_length=512, cache=False)
        records = prepare_data(section, tokenizer, 0).train
    windows = epoch_windows(records.lengths, size, 0, 0, True)
    return [collate(records, window, 0) for window in windows if len(window) == size][:count]


def forward_backward_flops(cell: Cell, batch: MicroBatch) -> tuple[float, float]:
    """FLOPs of the matrix products of a step: in the frozen blocks, and in the others with the head.

    A linear layer takes 2 a weight and token forward and, where backward comes, 2 more for the gradient of
    its input. Attention takes 4 · tokens · length · width, without credit for causality, and twice that
    backward. The head runs for labelled positions. Edits and norms do not count.
    """
    config = text_config(cell.model)
    rows, length = batch.input_ids.shape
    attention = 4.0 * rows * length * length * config.hidden_size
    layers = linears(cell.model)
    frozen = trained = 0.0
    for index, name in enumerate(decoder_blocks(cell.model)):
        products = sum(
            2.0 * rows * length * weights(m) for n, m in layers.items() if n.startswith(f"{name}.")
        )
        if index < cell.attached.frozen_blocks():
            frozen += products + attention
        else:
            trained += 2 * products + 3 * attention
    head = 2 * 2.0 * len(batch.labels) * weights(output_head(cell.model))
    return frozen, trained + head


@torch.no_grad()
def loss_of(cell: Cell, batch: MicroBatch, passes: AbstractContextManager[None]) -> float:
    """The loss of a batch as it is."""
    with passes, cell.attached.edits(batch.prompt_lengths):
        return float(summed_loss(cell.model, batch, cell.precision))


def spent(cell: Cell, batch: MicroBatch, passes: AbstractContextManager[None]) -> float:
    """Processor seconds of a step."""
    began = time.process_time()
    with passes:
        cell.step(batch)
    return time.process_time() - began


def main() -> None:
    """Take steps with and without the prefix in turns and print both ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    tune_allocator()
    torch.set_num_threads(args.threads)
    settings = {"rank": 8, "layers": list(range(24, 30)), "position": "f7+l7"}
    cell = build_cell("loreft", "dense", "single", "demo", World(0, 0, 1, CPU), settings=settings)
    work = batches(args.batches, args.batch_size)
    cache = PrefixCache(FrozenPrefix(cell.model, cell.attached.frozen_blocks()), MemoryStore(2**33))
    for batch in work:  # the first epoch
        if loss_of(cell, batch, cache.training(batch)) != loss_of(cell, batch, cache.training(batch)):
            raise SystemExit("the loss of a batch differs when its prefix comes from memory")
    whole: dict[int, list[float]] = {}
    kept: dict[int, list[float]] = {}
    for _ in range(args.rounds):
        for number, batch in enumerate(work):
            whole.setdefault(number, []).append(spent(cell, batch, nullcontext()))
            kept.setdefault(number, []).append(spent(cell, batch, cache.training(batch)))
    flops = [forward_backward_flops(cell, batch) for batch in work]
    frozen, rest = (sum(parts) for parts in zip(*flops, strict=True))
    # The median over rounds of each batch: long and short ones cost differently, and all count.
    measured = sum(map(statistics.median, whole.values())) / sum(map(statistics.median, kept.values()))
    promised = (frozen + rest) / rest
    tokens = sum(batch.input_ids.numel() for batch in work)
    print(f"{cell.attached.frozen_blocks()} of 30 blocks frozen, {tokens} tokens an epoch")
    print(f"processor time of the first epoch / of a later one: {measured:.2f} (goal: at least 1.8)")
    print(f"promised by the saved operations: {promised:.2f}")
    print(f"measured / promised: {measured / promised:.3f} (goal: 0.9 to 1.1)")


if __name__ == "__main__":
    main()
