"""Host memory and time of loading a model straight into shards, on one rank and on two.

    uv run python benchmarks/load_memory.py                # about 2 minutes on 2 cores

Memory is RssAnon above what the process held after its imports: pages of the mapped files are the
system's to drop. The bound is the rank's share plus two times the largest tensor.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

from measure import status_kib, table

MIB = 2**20


def work(base: str, model: str, folder: Path) -> None:
    """One rank: load and write down memory and time."""
    import torch

    from leantune.bases import build_base, fill
    from leantune.models.empty import materialise
    from leantune.models.precision import PRECISIONS
    from leantune.models.shards import local_rows
    from leantune.models.source import resolve_model
    from leantune.strategies import fsdp
    from leantune.strategies.process import join, leave

    torch.set_num_threads(1)
    world = join("cpu", 120.0)
    gc.collect()
    before = peak = status_kib("RssAnon")
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, status_kib("RssAnon"))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started = time.perf_counter()
    built = build_base(base, resolve_model(model), PRECISIONS["fp32"])
    fsdp.place(built.model, {}, world)
    materialise(built.model, world.device)
    fill(built, world.device)
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    held = [*built.model.parameters(), *built.model.buffers()]
    shapes = [built.weights.shape(slot.source) for slot in built.slots if slot.source]
    facts = {
        "peak": (peak - before) * 1024 / MIB,
        "share": sum(local_rows(tensor).local.nbytes for tensor in held) / MIB,
        "largest": 4 * max(torch.Size(shape).numel() for shape in shapes) / MIB,
        "seconds": seconds,
    }
    (folder / f"{base}-{world.size}-{world.rank}.json").write_text(json.dumps(facts))
    leave()


def main() -> None:
    """Load on one rank and on two, for each base, and print one row a measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--bases", default="dense,nf4,hqq")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        work(args.rank_of, args.model, args.folder)
        return
    from leantune.models.source import resolve_model
    from leantune.strategies.launch import launch

    resolve_model(args.model)  # the demo model is converted before anything is measured
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for base in args.bases.split(","):
            for size in (1, 2):
                launch(
                    ["--rank-of", base, "--model", args.model, "--folder", scratch],
                    devices_per_node=size,
                    command=[sys.executable, __file__],
                )
                ranks = [json.loads(p.read_text()) for p in Path(scratch).glob(f"{base}-{size}-*.json")]
                worst = max(ranks, key=lambda rank: rank["peak"] - rank["share"])
                rows.append(
                    {
                        "base": base,
                        "ranks": size,
                        "share MiB": worst["share"],
                        "peak MiB": worst["peak"],
                        "bound MiB": worst["share"] + 2 * worst["largest"],
                        "seconds": max(rank["seconds"] for rank in ranks),
                    }
                )
    print(table(rows))


if __name__ == "__main__":
    main()
