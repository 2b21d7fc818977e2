"""Is a GPU machine good for training? Every cell of the grid on random Llamas made on the spot, in minutes.

    PYTHONPATH=src python3 benchmarks/gpu_check.py                         # one GPU, at most 6 minutes
    PYTHONPATH=src python3 benchmarks/gpu_check.py --device cpu --tiny     # all of it on a CPU, a minute

Needs no network, no model, and no other packages than torch, transformers, numpy and safetensors; wheels
of optional ones (bitsandbytes) in the folder that --wheels names are installed into a scratch folder first.
Three tables: losses on the device against fp32 on the CPU; what clipping and a schedule cost; speed and
memory of each cell. They are printed, and kept in $OUT/gpu_check.md if $OUT is set, row by row as they come.
Exit code 1 if a cell failed, or its losses differ.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from cells import (
    FLOPS,
    LLAMA_1B,
    LLAMA_TINY,
    build_cell,
    flops_of_step,
    held_bytes,
    random_batch,
    random_llama,
)

from leantune.config.grid import BASES, METHODS, STRATEGIES, refusal
from leantune.errors import ModelError
from leantune.strategies.process import World
from leantune.train.optimizer import build_schedule

from measure import reset_peak, status_kib, table

LOSS_STEPS, TOLERANCE, COST_TARGET = 5, 1e-4, 1.05
WARMUP = 2
GIB = 2**30
# Dense bf16 TFLOP/s of the makers' data sheets; a device is known by a part of its name.
PEAKS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0}


@dataclass
class Report:
    """The tables so far; written anew with each row, so that a check that is stopped leaves what it has."""

    file: Path | None
    lines: list[str]
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    failed: bool = False

    def add(self, title: str, **row: Any) -> None:
        """Add a row to the table of this title."""
        self.rows.setdefault(title, []).append(row)
        shown = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values())
        print(" | ".join(shown), file=sys.stderr, flush=True)
        if self.file is not None:
            self.file.write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """The page."""
        parts = ["# GPU check", *self.lines]
        for title, rows in self.rows.items():
            parts += [f"## {title}", table(rows)]
        parts += [f"({number}) {reason}" for number, reason in enumerate(self.refusals, 1)]
        formula = "MFU: FLOPs of a step / its seconds / the device's dense bf16 peak. " + FLOPS
        return "\n\n".join([*parts, formula, ""])

    def refused(self, reason: str) -> str:
        """The number under which the page gives a reason."""
        if reason not in self.refusals:
            self.refusals.append(reason)
        return f"refused ({self.refusals.index(reason) + 1})"


@dataclass
class Clock:
    """The time that is left; a piece of work starts only if the longest one of its kind so far would fit."""

    deadline: float
    longest: dict[str, float] = field(default_factory=dict)

    def fits(self, kind: str) -> bool:
        """Whether there is time for one more piece of work of this kind."""
        return time.perf_counter() + 1.2 * self.longest.get(kind, 0.0) < self.deadline

    def time(self, kind: str, work: Callable[[], Any]) -> Any:
        """Do it, and remember how long it took."""
        start = time.perf_counter()
        try:
            return work()
        finally:
            self.longest[kind] = max(self.longest.get(kind, 0.0), time.perf_counter() - start)


@dataclass(frozen=True)
class Setting:
    """What all cells are measured on."""

    device: torch.device
    folder: str
    vocab_size: int
    records: int
    length: int
    steps: int

    @property
    def world(self) -> World:
        """One process."""
        return World(0, 0, 1, self.device)

    def batch(self, seed: int = 0) -> Any:
        """A batch of this size on the device."""
        return random_batch(self.vocab_size, self.records, self.length, self.device, seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the three checks; returns the exit code."""
    args = arguments().parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here; use --device cpu --tiny to run the check on a CPU")
    # The imports are over, and the last piece of work may take longer than its kind did before.
    clock = Clock(time.perf_counter() + 0.9 * 60 * args.minutes)
    with tempfile.TemporaryDirectory() as scratch, process_group(device):
        folder = Path(scratch)
        if args.wheels:
            install_wheels(args.wheels, folder / "site")
        report = Report(out_file(), describe(device))
        tiny = random_llama(folder / "tiny", LLAMA_TINY, torch.float32, torch.device("cpu"))
        small = Setting(device, str(tiny), LLAMA_TINY["vocab_size"], 4, 48, args.steps)
        cells = [cell for cell in grid() if not args.only or cell[0] in args.only]
        compare_losses(cells, small, clock, report)
        big = small
        if not args.tiny:
            random_llama(folder / "1b", LLAMA_1B, torch.bfloat16, device)
            length = args.length
            big = Setting(
                device, str(folder / "1b"), LLAMA_1B["vocab_size"], args.batch_size, length, args.steps
            )
        for method, offload in itertools.product(("lora", "full"), (False, True)):
            if not args.only or method in args.only:
                measure_costs(method, offload, big, clock, report)
        measure_cells(cells, big, clock, report)
        print(report.text())
    return int(report.failed)


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, not one of 1 B parameters")
    parser.add_argument("--minutes", type=float, default=6.0, help="what does not fit is listed as not run")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of optional packages")
    parser.add_argument("--only", nargs="+", choices=METHODS, help="methods (default: all)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a cell")
    parser.add_argument("--batch-size", type=int, default=8, help="records of a batch (1 B model)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a record (1 B model)")
    return parser


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """A group of one, so that ddp and fsdp really communicate."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def install_wheels(wheels: Path, target: Path) -> None:
    """Install all wheels of a folder, without a network and without touching the machine's packages."""
    files = sorted(str(file) for file in wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"--wheels {wheels}: there are no .whl files in it")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, *files], check=True)
    sys.path.insert(0, str(target))


def out_file() -> Path | None:
    """Where the report is kept, if anywhere."""
    return Path(os.environ["OUT"]) / "gpu_check.md" if os.environ.get("OUT") else None


def describe(device: torch.device) -> list[str]:
    """What it runs on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    return [
        f"{name}, {torch.get_num_threads()} CPU threads; Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}."
    ]


def grid() -> list[tuple[str, str, str]]:
    """All cells that the table of refusals lets through."""
    cells = (
        (method, base, strategy) for strategy, base, method in itertools.product(STRATEGIES, BASES, METHODS)
    )
    return [cell for cell in cells if not refusal(*cell)]


def why_failed(error: Exception, base: str, strategy: str, report: Report) -> str:
    """What a table says of a cell that raised; anything but the known limit of old torch is a failure."""
    old_torch = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)
    line = " ".join(str(error).split())
    if isinstance(error, ModelError) and old_torch and base != "dense" and strategy == "fsdp":
        return report.refused(line)
    report.failed = True
    return f"FAILED: {type(error).__name__}: {line[:300]}"


def release() -> None:
    """Give the memory of the last cell back; sharded models hang in reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare_losses(
    cells: Sequence[tuple[str, str, str]], setting: Setting, clock: Clock, report: Report
) -> None:
    """Losses of the tiny model on the device in fp32, against one process on the CPU in fp32."""
    cpu = Setting(torch.device("cpu"), setting.folder, setting.vocab_size, setting.records, setting.length, 0)
    references: dict[tuple[str, str], list[float]] = {}

    def difference(method: str, base: str, strategy: str) -> str:
        if (method, base) not in references:
            references[method, base] = losses(method, base, "single", cpu)
        expected = references[method, base]
        found = losses(method, base, strategy, setting)
        worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
        report.failed |= not worst < TOLERANCE
        return f"{worst:.1e}{'' if worst < TOLERANCE else ' TOO MUCH'}"

    title = f"Largest relative difference of {LOSS_STEPS} losses to fp32 on the CPU (below {TOLERANCE:g})"
    for method, base, strategy in cells:
        result = "not run: no time left"
        if clock.fits("losses"):
            try:
                result = clock.time("losses", lambda m=method, b=base, s=strategy: difference(m, b, s))
            except Exception as error:
                result = why_failed(error, base, strategy, report)
            release()
        report.add(title, method=method, base=base, strategy=strategy, difference=result)


def losses(method: str, base: str, strategy: str, setting: Setting) -> list[float]:
    """The losses of a few steps in fp32."""
    cell = build_cell(method, base, strategy, setting.folder, setting.world)
    return [float(cell.step(setting.batch(seed))) for seed in range(LOSS_STEPS)]


def measure_costs(method: str, offload: bool, setting: Setting, clock: Clock, report: Report) -> None:
    """Step time with a gradient norm, with clipping and with a cosine schedule, over that without."""
    title = f"Cost in step time under fsdp, sharded parameters (target: below {COST_TARGET})"
    label = {"method": method, "cpu offload": "yes" if offload else "no"}
    names = ("plain step, s", "norm for the log", "norm and clipping", "cosine schedule")
    values: dict[str, Any] = dict.fromkeys(names, "–")
    note = "not run: no time left"
    if clock.fits("costs"):
        try:
            times = clock.time("costs", lambda: cost_times(method, offload, setting))
            plain = times.pop("plain")
            values = dict(zip(names, [plain, *(t / plain for t in times.values())], strict=True))
            note = ""
        except Exception as error:
            note = why_failed(error, "dense", "fsdp", report)
        release()
    report.add(title, **label, **values, note=note)


def cost_times(method: str, offload: bool, setting: Setting) -> dict[str, float]:
    """Median seconds of each kind of step, taken in turns."""
    placing = {"cpu_offload": offload, "adapter": "sharded"}
    cell = build_cell(
        method, "dense", "fsdp", setting.folder, setting.world, precision="bf16_mixed", placing=placing
    )
    batch = setting.batch()
    rate = build_schedule("cosine", 1e-3, 100, 0, 0.1)
    kinds: dict[str, Callable[[int], Any]] = {
        "plain": lambda _: cell.step(batch, norm=False),
        "norm": lambda _: cell.step(batch),
        "clip": lambda _: cell.step(batch, clip=0.3),
        "cosine": lambda number: cell.step(batch, norm=False, rate=rate(number)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(setting.steps + 1):
        for name, step in kinds.items():
            seconds[name].append(timed(lambda step=step, number=number: step(number), setting.device))
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def measure_cells(
    cells: Sequence[tuple[str, str, str]], setting: Setting, clock: Clock, report: Report
) -> None:
    """Speed and memory of each cell in bf16_mixed."""
    tokens = setting.records * setting.length
    title = f"The grid in bf16_mixed, batches of {setting.records} × {setting.length} = {tokens} tokens"
    columns = ("load, s", "tokens/s", "MFU", "weights held, GiB", "peak, GiB", "loss")
    for method, base, strategy in cells:
        values: dict[str, Any] = dict.fromkeys(columns, "–")
        note = "not run: no time left"
        if clock.fits("cells"):
            try:
                values = clock.time(
                    "cells", lambda m=method, b=base, s=strategy: measure_cell(m, b, s, setting)
                )
                note = ""
            except Exception as error:
                note = why_failed(error, base, strategy, report)
            release()
        report.add(title, method=method, base=base, strategy=strategy, **values, note=note)


def measure_cell(method: str, base: str, strategy: str, setting: Setting) -> dict[str, Any]:
    """One row of the table."""
    start = time.perf_counter()
    cell = build_cell(method, base, strategy, setting.folder, setting.world, precision="bf16_mixed")
    synchronise(setting.device)
    load = time.perf_counter() - start
    held = held_bytes(cell.model)
    batch = setting.batch()
    before = forget_peak(setting.device)
    found: list[torch.Tensor] = []
    seconds = [
        timed(lambda: found.append(cell.step(batch)), setting.device) for _ in range(WARMUP + setting.steps)
    ]
    step = statistics.median(seconds[WARMUP:])
    speed = flops_of_step(cell, batch) / step
    peak = device_peak(setting.device)
    return {
        "load, s": load,
        "tokens/s": f"{batch.input_ids.numel() / step:.0f}",
        "MFU": "–" if peak is None else f"{100 * speed / peak:.1f} %",
        "weights held, GiB": held / GIB,
        "peak, GiB": peak_bytes(setting.device, before) / GIB,
        "loss": f"{float(found[0]):.3f} → {float(found[-1]):.3f}",
    }


def device_peak(device: torch.device) -> float | None:
    """FLOP/s of dense bf16 products by the data sheet; None for a device that is not in the table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((1e12 * peak for part, peak in PEAKS.items() if part in name), None)


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that some work takes on the device."""
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


def forget_peak(device: torch.device) -> int:
    """Start a new peak; returns the zero of `peak_bytes`, on a CPU what the process holds now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    return 1024 * reset_peak()


def peak_bytes(device: torch.device, before: int) -> int:
    """Allocated on a GPU, weights included; on a CPU what came on top of `before`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * status_kib("VmHWM") - before


if __name__ == "__main__":
    gc.freeze()  # what is imported need not be searched after every cell
    raise SystemExit(main())
