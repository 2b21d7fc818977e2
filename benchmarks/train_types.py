"""The ten train types of fsdp_qlora, and LoReFT, under ddp and fsdp on 2 processes: curves, speed, memory.

    uv run python benchmarks/train_types.py --write        # all of it into docs/train-types.md, half an hour
    uv run python benchmarks/train_types.py --only hqq_dora loreft --strategies fsdp --steps 5
    uv run python benchmarks/train_types.py --peak peft    # our LoRA on NF4 against PEFT's: peak memory

Each run is `leantune train` with a preset in processes of its own, fp32, one seed, generated text-to-SQL
records (about 80 tokens each), 2 a process and step. Curves of one type must agree across strategies.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from leantune.config.presets import PRESETS

from measure import alpaca_like, table

DOCUMENT = Path(__file__).parents[1] / "docs" / "train-types.md"
RECORDS = 2  # of a process and step
SHOWN_STEPS = (1, 5, 10, 15, 20)
FIRST_STEPS, FIRST_GOAL, GOAL = 3, 1e-5, 1e-4


class TrainType(NamedTuple):
    """A train type: the preset that it is here, and the peak learning rate that it is run with."""

    preset: str
    learning_rate: float
    remark: str = ""


# Names on the left are fsdp_qlora's, where it has one.
TYPES = {
    "full": TrainType("full", 1e-5),
    "lora": TrainType("peft_lora", 5e-4, "PEFT's module"),
    "custom_lora": TrainType("custom_lora", 5e-4),
    "qlora": TrainType("peft_qlora", 5e-4, "PEFT's module"),
    "custom_qlora": TrainType("custom_qlora", 5e-4),
    "hqq_lora": TrainType("hqq_lora", 5e-4),
    "bnb_dora": TrainType("bnb_dora", 5e-4),
    "hqq_dora": TrainType("hqq_dora", 5e-4),
    "bnb_llama_pro": TrainType("bnb_llama_pro", 1e-4),
    "hqq_llama_pro": TrainType("hqq_llama_pro", 1e-4),
    "loreft": TrainType("loreft", 4e-3),
    "loreft on nf4": TrainType("qreft", 4e-3),
}
STRATEGIES = ("ddp", "fsdp")


class Finished(NamedTuple):
    """What a run came to: the loss of each step, tokens/s after the first, the largest peak of a rank."""

    losses: list[float]
    tokens_per_second: float
    peak_gib: float


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, and write if asked to."""
    args = arguments().parse_args(argv)
    if args.peak:
        print(compare_peaks(args))
        return
    runs: dict[tuple[str, str], Finished] = {}
    for name in args.only:
        for strategy in args.strategies:
            print(f"{name}, {strategy} ...", file=sys.stderr, flush=True)
            runs[name, strategy] = train(type_overrides(TYPES[name], strategy, args), TYPES[name].preset)
    text = page(runs, args)
    print(text)
    if args.write:
        DOCUMENT.write_text(text, encoding="utf-8")


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="folder of a model; default: the demo model")
    parser.add_argument("--only", nargs="+", choices=TYPES, default=list(TYPES), metavar="TYPE")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name} too")
    parser.add_argument("--peak", choices=("peft",), help="compare peak memory with another implementation")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of --peak")
    return parser


def type_overrides(kind: TrainType, strategy: str, args: argparse.Namespace) -> list[str]:
    """The run of a train type."""
    return [
        f"model={args.model}",
        "data.train=text-to-sql",
        f"data.generated_records={RECORDS * args.processes * args.steps}",
        "data.max_length=256",
        f"strategy.name={strategy}",
        f"strategy.devices={args.processes}",
        f"train.micro_batch_size={RECORDS}",
        f"train.max_steps={args.steps}",
        f"train.learning_rate={kind.learning_rate:.1e}",
    ]


def train(overrides: Sequence[str], preset: str, threads: int | None = None) -> Finished:
    """One run of the command line in fresh processes, on the CPU in fp32; a failed one ends the benchmark."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        fixed = ["train.precision=fp32", "train.device=cpu", "train.seed=42", "output.checkpoints=false"]
        command = [sys.executable, "-m", "leantune", "train", "--preset", preset, "--quiet"]
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if threads:
            env["OMP_NUM_THREADS"] = str(threads)
        done = subprocess.run(
            [*command, *overrides, *fixed, f"output.dir={folder}"],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{preset} failed:\n{done.stdout}\n{done.stderr}")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        result = json.loads((folder / "result.json").read_text())
    spent = rows[-1]["seconds"] - rows[0]["seconds"]
    tokens = sum(row["total_tokens"] for row in rows[1:])
    return Finished([r["loss"] for r in rows], tokens / spent if spent else 0.0, result["peak_memory_gib"])


def page(runs: Mapping[tuple[str, str], Finished], args: argparse.Namespace) -> str:
    """The document: a row for each run, and how far the curves of one type are apart."""
    rows = [run_row(name, strategy, run) for (name, strategy), run in runs.items()]
    parts = [
        "# The train types of fsdp_qlora, and LoReFT",
        f"Model `{args.model}`"
        + (" (SmolLM2-135M-Instruct)" if args.model == "demo" else "")
        + f", {args.processes} processes on the CPU, fp32, {args.steps} steps of "
        f"{RECORDS * args.processes} generated text-to-SQL records (about 80 tokens each). Written by "
        "`benchmarks/train_types.py --write`; every row is a run of `leantune train --preset` with the "
        "preset that [presets](presets.md) gives for the train type (`lora` and `qlora` with PEFT's module). "
        f"Learning rates: {rates(runs)}.",
        table(rows),
        "tokens/s: of all processes together, without the first step. peak: that of the process that used "
        "most, above its memory after the imports; while a checkpoint is read its mapped pages count too. "
        "All processes share the cores of one machine, so the speeds compare types, not machines.",
    ]
    agreements = agreement_rows(runs)
    if agreements:
        parts += [
            "## Agreement of the curves",
            f"Largest relative difference of the losses of {' and '.join(STRATEGIES)}, over the first "
            f"{FIRST_STEPS} steps (goal: at most {FIRST_GOAL:g}) and over all (goal: at most {GOAL:g}).",
            table(agreements),
        ]
    return "\n\n".join([*parts, ""])


def run_row(name: str, strategy: str, run: Finished) -> dict[str, str]:
    """One run as a row of text."""
    kind, preset = TYPES[name], PRESETS[TYPES[name].preset]
    steps = [step for step in SHOWN_STEPS if step <= len(run.losses)]
    return {
        "type": f"{name} ({kind.remark})" if kind.remark else name,
        "method": preset.method,
        "base": preset.base,
        "strategy": strategy,
        **{f"loss {step}": f"{run.losses[step - 1]:.4f}" for step in steps},
        "tokens/s": f"{run.tokens_per_second:.0f}",
        "peak, GiB": f"{run.peak_gib:.2f}",
    }


def agreement_rows(runs: Mapping[tuple[str, str], Finished]) -> list[dict[str, str]]:
    """For each type that ran under both strategies, how far apart its curves are."""
    rows: list[dict[str, str]] = []
    for name in dict.fromkeys(name for name, _ in runs):
        curves = [runs[name, strategy].losses for strategy in STRATEGIES if (name, strategy) in runs]
        if len(curves) == len(STRATEGIES):
            first, whole = apart(curves[0][:FIRST_STEPS], curves[1][:FIRST_STEPS]), apart(*curves)
            met = "yes" if first <= FIRST_GOAL and whole <= GOAL else "NO"
            rows.append(
                {"type": name, "first steps": f"{first:.1e}", "all steps": f"{whole:.1e}", "goal met": met}
            )
    return rows


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def rates(runs: Mapping[tuple[str, str], Finished]) -> str:
    """Which types were run with which learning rate."""
    by_rate: dict[float, list[str]] = {}
    for name in dict.fromkeys(name for name, _ in runs):
        by_rate.setdefault(TYPES[name].learning_rate, []).append(name)
    return "; ".join(f"{rate:g} for {', '.join(names)}" for rate, names in by_rate.items())


def compare_peaks(args: argparse.Namespace) -> str:
    """Peak memory of our LoRA on NF4 and of PEFT's on the same base: to the byte, and of whole runs."""
    return f"{exact_peaks(args)}\n\n{run_peaks(args)}"


def exact_peaks(args: argparse.Namespace) -> str:
    """Bytes of all tensors of one step beyond the loaded model, counted as they come and go."""
    import torch
    from cells import TensorBytes, build_cell, random_batch

    from leantune.models.anatomy import text_config
    from leantune.strategies.process import World

    cpu = torch.device("cpu")

    def peak(implementation: str, precision: str, dropout: float) -> float:
        settings = {"rank": 16, "dropout": dropout, "implementation": implementation}
        world = World(0, 0, 1, cpu)
        cell = build_cell("lora", "nf4", "single", args.model, world, precision=precision, settings=settings)
        batch = random_batch(int(text_config(cell.model).vocab_size), 2, 64, cpu)
        cell.step(batch)  # the optimizer makes its state
        with TensorBytes() as count:
            cell.step(batch)
        return count.peak / 2**20

    rows: list[dict[str, Any]] = []
    for precision, dropout in itertools.product(("fp32", "bf16_mixed"), (0.0, 0.1)):
        ours, theirs = (peak(side, precision, dropout) for side in ("leantune", "peft"))
        rows.append(
            {
                "precision": precision,
                "dropout": dropout,
                "leantune, MiB": ours,
                "peft, MiB": theirs,
                "ratio": ours / theirs,
            }
        )
    return f"Tensors of a step beyond the loaded model, at their peak, 128 tokens\n\n{table(rows)}"


def run_peaks(args: argparse.Namespace) -> str:
    """Peak resident size of whole runs, one process, in turns; the heap's holes are part of it."""
    sides = {"leantune": "custom_qlora", "peft": "peft_qlora"}
    found: dict[str, list[Finished]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as scratch:
        data = alpaca_like(Path(scratch) / "records.json", 4 * args.steps)
        overrides = [
            f"model={args.model}",
            f"data.train={data}",
            "data.template=alpaca",
            "data.max_length=512",
            "train.micro_batch_size=4",
            f"train.max_steps={args.steps}",
        ]
        for _ in range(args.rounds):
            for side, preset in sides.items():
                found[side].append(train(overrides, preset, threads=2))
    rows = [
        {"side": side, "peak, GiB": run.peak_gib, "tokens/s": run.tokens_per_second, "loss": run.losses[-1]}
        for side, runs in found.items()
        for run in runs
    ]
    peak = {side: statistics.median(run.peak_gib for run in runs) for side, runs in found.items()}
    ratio = peak["leantune"] / peak["peft"]
    return f"{table(rows)}\n\npeak memory, leantune / peft, LoRA on NF4: {ratio:.3f} (goal: below 1)"


if __name__ == "__main__":
    main()
