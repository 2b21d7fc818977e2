"""NF4 on the CPU: leantune's plain PyTorch path against bitsandbytes' operations, as ratios in one run.

    uv run python benchmarks/nf4_dequantise.py             # about half a minute on one core

The two alternate, with the command line's allocator settings; each figure is the best of several
rounds. A ratio above 1 means that the plain path is the faster one. Quantising needs no
bitsandbytes in leantune; de-quantising uses its kernel where it is installed.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from leantune.cli.allocator import tune_allocator
from leantune.ops.nf4 import BLOCK, dequantise_plain, quantise

from measure import table

SHAPES = ((576, 576), (1536, 576), (576, 1536), (4096, 11008))  # SmolLM2-135M's, and one of a 7 B model
DTYPES = (torch.float32, torch.bfloat16)


def main() -> None:
    """Print a row for each matrix and operation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    tune_allocator()
    torch.set_num_threads(args.threads)
    importlib.import_module("bitsandbytes")
    rows = [row for shape in SHAPES for row in measure_shape(shape, args.rounds)]
    print(table(rows))


def measure_shape(shape: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Nanoseconds a value of both sides; stops if they do not agree to the bit."""
    weight = torch.randn(*shape)
    codes, scales = quantise(weight)
    theirs = torch.ops.bitsandbytes
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "quantise": (
            lambda: quantise(weight),
            lambda: theirs.quantize_4bit.default(weight, BLOCK, "nf4", torch.uint8),
        )
    }
    for dtype in DTYPES:
        pairs[f"de-quantise to {str(dtype).removeprefix('torch.')}"] = (
            lambda dtype=dtype: dequantise_plain(codes, scales, dtype),
            lambda dtype=dtype: theirs.dequantize_4bit.default(codes, scales, BLOCK, "nf4", shape, dtype),
        )
    rows: list[dict[str, Any]] = []
    for name, (plain, other) in pairs.items():
        check_equal(name, plain(), other())
        ours, bitsandbytes = alternate(plain, other, rounds)
        each = 1e9 / weight.numel()
        rows.append(
            {
                "matrix": f"{shape[0]} × {shape[1]}",
                "operation": name,
                "plain, ns a value": ours * each,
                "bitsandbytes, ns a value": bitsandbytes * each,
                "speed, plain : bitsandbytes": bitsandbytes / ours,
            }
        )
    return rows


def check_equal(name: str, ours: Any, theirs: Any) -> None:
    """A comparison of speed is one of equal results."""
    both = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
    if not all(torch.equal(a.flatten(), b.flatten()) for a, b in both):
        raise SystemExit(f"{name}: the results differ")


def alternate(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The best seconds of each, taken in turns so that both see the same machine."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for index, run in enumerate((first, second)):
            start = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - start)
    return best[0], best[1]


if __name__ == "__main__":
    main()
