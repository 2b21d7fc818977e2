"""What the command line's allocator settings change: tokens/s, peak memory and page faults of a LoRA run.

    uv run python benchmarks/allocator.py                  # about 3 minutes on 2 cores

The same run, each time in a fresh process, with glibc's malloc as it is and as
`leantune.cli.allocator` sets it up.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from pathlib import Path

from lora_vs_trainer import leantune_side

from leantune.cli.allocator import tune_allocator

from measure import alpaca_like, child, table

MODES = ("default", "tuned")


def main() -> None:
    """Alternate the two and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        if args.mode == "tuned":
            tune_allocator()
        result = leantune_side(args.data, args.records, 512)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        print(json.dumps({**result, "page_faults_millions": faults / 1e6}))
        return
    with tempfile.TemporaryDirectory() as folder:
        data = str(alpaca_like(Path(folder) / "records.json", args.records))
        common = ["--data", data, "--records", str(args.records)]
        rows = [
            {"malloc": mode, **child(__file__, [*common, "--mode", mode], {"OMP_NUM_THREADS": "2"})}
            for _ in range(args.rounds)
            for mode in MODES
        ]
    print(table(rows))


if __name__ == "__main__":
    main()
