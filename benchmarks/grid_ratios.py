"""What packing and sharding cost in speed, and save in memory, on a CPU: three ratios.

    uv run python benchmarks/grid_ratios.py                # about 8 minutes on 2 cores
    uv run python benchmarks/grid_ratios.py --only nf4     # or fsdp, or memory

nf4: LoRA on NF4 against LoRA on dense fp32: both models in one process with 2 threads, steps in turns.
fsdp: FSDP on 2 processes against DDP on 2 (LoRA, dense fp32, 1 thread each): both in the same processes,
steps in turns.
memory: what the weights take on a rank, NF4 + FSDP at 2 ranks against dense + DDP at 2: bytes of parameters
and buffers (exact), anonymous memory after loading, and the peak of a pass over one record of 16 tokens,
whose activations are next to nothing; the last two above the memory after the imports.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from cells import Cell, build_cell, held_bytes, random_batch

from leantune.cli.allocator import tune_allocator
from leantune.models.anatomy import text_config
from leantune.models.source import resolve_model
from leantune.strategies.launch import launch
from leantune.strategies.process import World, barrier, gather_objects, join, leave

from measure import reset_peak, status_kib, table

GOALS = {"nf4": "at least 0.75", "fsdp": "at least 0.7", "memory": "at most 0.45"}
LENGTHS = (96, 160, 224, 320)  # tokens a record, as Alpaca's are spread
MIB = 2**20
Seconds = dict[str, list[tuple[float, float]]]  # cell: wall and processor seconds of each step


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Print the tables and the ratios; returns the ratios."""
    args = arguments().parse_args(argv)
    args.model = resolve_model(args.model).location
    if args.worker:
        WORKERS[args.worker](args)
        return {}
    ratios: dict[str, float] = {}
    if "nf4" in args.only:
        ratios["nf4"] = packed_speed(args)
    if "fsdp" in args.only:
        ratios["fsdp"] = sharded_speed(args)
    if "memory" in args.only:
        ratios |= weights_memory(args)
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f} (goal: {GOALS[name.partition(',')[0]]})")
    return ratios


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="folder of a model; default: the demo model")
    parser.add_argument("--only", nargs="+", choices=GOALS, default=list(GOALS))
    parser.add_argument("--rounds", type=int, default=2, help="passes over the lengths")
    parser.add_argument("--batch-size", type=int, default=4, help="records of a rank and step")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser


def packed_speed(args: argparse.Namespace) -> float:
    """Tokens/s of LoRA on NF4 over that of LoRA on dense weights."""
    torch.set_num_threads(min(2, torch.get_num_threads()))
    world = World(0, 0, 1, torch.device("cpu"))
    cells = {base: build_cell("lora", base, "single", args.model, world) for base in ("dense", "nf4")}
    seconds = alternate(cells, args, lambda: None)
    kernel = "bitsandbytes' kernel" if importlib.util.find_spec("bitsandbytes") else "the plain path"
    print(f"\nLoRA on NF4 ({kernel}) and on dense weights, one process, {torch.get_num_threads()} threads\n")
    return speed_ratio(seconds, "nf4", "dense", args.batch_size)


def sharded_speed(args: argparse.Namespace) -> float:
    """Tokens/s of FSDP over that of DDP, both on 2 processes."""
    seconds = on_two_ranks("speed", args)
    print("\nFSDP and DDP on 2 processes, LoRA on dense weights, 1 thread each\n")
    return speed_ratio(seconds, "fsdp", "ddp", 2 * args.batch_size)


def speed_worker(args: argparse.Namespace) -> None:
    """One rank: both placements of the model, steps in turns."""
    world = join("cpu", 600.0)
    cells = {name: build_cell("lora", "dense", name, args.model, world) for name in ("ddp", "fsdp")}
    finish(args, world, alternate(cells, args, barrier))


def alternate(cells: dict[str, Cell], args: argparse.Namespace, meet: Callable[[], None]) -> Seconds:
    """Seconds of each step of each cell, in turns over batches of all lengths; the first ones warm up."""
    seconds: Seconds = {name: [] for name in cells}
    vocab_size = int(text_config(next(iter(cells.values())).model).vocab_size)
    for number in range(-1, args.rounds * len(LENGTHS)):
        length = LENGTHS[number % len(LENGTHS)]
        batch = random_batch(vocab_size, args.batch_size, length, torch.device("cpu"), seed=number + 1)
        for name, cell in cells.items():
            meet()
            start, processor = time.perf_counter(), time.process_time()
            cell.step(batch)
            meet()
            if number >= 0:
                seconds[name].append((time.perf_counter() - start, time.process_time() - processor))
    return seconds


def speed_ratio(seconds: Seconds, name: str, other: str, num_records: int) -> float:
    """Print a row for each step; returns the median of the steps' ratios of speed.

    The ratio of processor time is shown beside it: neighbours on the machine disturb that less.
    """
    rows: list[dict[str, Any]] = []
    for number, (mine, theirs) in enumerate(zip(seconds[name], seconds[other], strict=True)):
        length = LENGTHS[number % len(LENGTHS)]
        tokens = num_records * length
        rows.append(
            {
                "tokens a record": length,
                f"{name}, tokens/s": tokens / mine[0],
                f"{other}, tokens/s": tokens / theirs[0],
                "ratio": theirs[0] / mine[0],
                "ratio by processor time": theirs[1] / mine[1],
            }
        )
    print(table(rows) + "\n")
    processor = statistics.median(row["ratio by processor time"] for row in rows)
    print(f"{name} : {other} by processor time of a process: {processor:.3f}\n")
    return statistics.median(row["ratio"] for row in rows)


def weights_memory(args: argparse.Namespace) -> dict[str, float]:
    """The weights' share of a rank's memory, by each of the three ways to count it."""
    cells = {"nf4 + fsdp": ("nf4", "fsdp"), "dense + ddp": ("dense", "ddp")}
    found = {name: on_two_ranks("memory", args, "--cell", *cell) for name, cell in cells.items()}
    small, large = found.values()
    ratios = {kind: small[kind] / large[kind] for kind in small}
    print("\nMiB of the rank that has most, 2 ranks, LoRA of rank 1\n")
    rows = [
        {"what": kind, **{name: values[kind] for name, values in found.items()}, "ratio": ratio}
        for kind, ratio in ratios.items()
    ]
    print(table(rows) + "\n")
    return {f"memory, {kind}": ratios[kind] for kind in (HELD, LOADED, PEAK)}


HELD, EMBEDDING = "parameters and buffers", "of these, the embedding"
LOADED, PEAK = "anonymous memory after loading", "peak of a pass of 16 tokens"


def memory_worker(args: argparse.Namespace) -> None:
    """One rank: its memory with a model loaded, and in one pass."""
    world = join("cpu", 600.0)
    base, strategy = args.cell
    anonymous, resident = status_kib("RssAnon"), reset_peak()
    cell = build_cell("lora", base, strategy, args.model, world, settings={"rank": 1})
    loaded = status_kib("RssAnon") - anonymous
    embedding: Any = cell.model.get_input_embeddings()
    vocab_size = int(text_config(cell.model).vocab_size)
    reset_peak()
    cell.step(random_batch(vocab_size, 1, 16, world.device), norm=False)
    mine = {
        HELD: held_bytes(cell.model) / MIB,
        EMBEDDING: held_bytes(embedding) / MIB,
        LOADED: loaded / 1024,
        PEAK: (status_kib("VmHWM") - resident) / 1024,
    }
    ranks = gather_objects(mine)
    finish(args, world, {kind: max(rank[kind] for rank in ranks) for kind in mine})


WORKERS = {"speed": speed_worker, "memory": memory_worker}


def on_two_ranks(worker: str, args: argparse.Namespace, *extra: str) -> dict[str, Any]:
    """Run a worker in 2 fresh processes; returns what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = {"model": args.model, "rounds": args.rounds, "batch-size": args.batch_size}
        shared = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        launch(
            ["--worker", worker, *shared, "--result", str(result), *extra],
            devices_per_node=2,
            command=[sys.executable, __file__],
            env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        return json.loads(result.read_text())


def finish(args: argparse.Namespace, world: World, found: dict[str, Any]) -> None:
    """Hand the result over, and leave."""
    if world.is_main:
        args.result.write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    tune_allocator()  # as the command line does
    main()
