"""Two 1-thread `ddp` processes against two independent 1-thread runs started together.

    uv run python benchmarks/ddp_scaling.py                # about 6 minutes on 2 cores

Both use both cores fully; the independent runs have nobody to wait for. The figure is
the tokens/s of the ddp run over the sum of the two independent runs' tokens/s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import alpaca_like, table


def start(
    folder: Path, name: str, data: Path, method: str, steps: int, devices: int
) -> subprocess.Popen[bytes]:
    """Start one training run in the background."""
    overrides = [
        "model=demo",
        f"data.train={data}",
        "data.template=alpaca",
        "data.max_length=512",
        f"method={method}",
        f"strategy.devices={devices}",
        "train.micro_batch_size=4",
        f"train.global_batch_size={8 * devices}",
        f"train.max_steps={steps}",
        "output.checkpoints=false",
        f"output.dir={folder / name}",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "leantune", "train", *overrides, "--quiet"]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)


def speed(folder: Path) -> float:
    """Tokens/s after the first step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(row["total_tokens"] for row in rows[1:])
    return tokens / (rows[-1]["seconds"] - rows[0]["seconds"])


def wait(*runs: subprocess.Popen[bytes]) -> None:
    """Wait for all; a failed run ends the benchmark."""
    for run in runs:
        if run.wait():
            raise SystemExit(f"a run failed with exit code {run.returncode}")


def main() -> None:
    """Alternate the two arrangements and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="lora")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = alpaca_like(folder / "records.json", 16 * args.steps)
        for number in range(args.rounds):
            wait(start(folder, f"ddp{number}", data, args.method, args.steps, devices=2))
            names = [f"alone{number}a", f"alone{number}b"]
            wait(*(start(folder, name, data, args.method, args.steps, devices=1) for name in names))
            both = speed(folder / f"ddp{number}")
            alone = [speed(folder / name) for name in names]
            ratios.append(both / sum(alone))
            rows.append(
                {"round": number, "ddp": both, "alone a": alone[0], "alone b": alone[1], "ratio": ratios[-1]}
            )
    print(table(rows))
    print(f"\nddp / sum of independent runs: {statistics.median(ratios):.2f} (goal: at least 0.9)")


if __name__ == "__main__":
    main()
