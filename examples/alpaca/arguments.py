"""The flags of the Alpaca example, in the words its users know, as a leantune run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def parse() -> dict[str, Any]:
    """Read the command line; returns a run configuration as plain values."""
    parser = argparse.ArgumentParser(description="LoReFT on Alpaca records")
    parser.add_argument("--model_name_or_path", required=True, help="model folder, hub id, or demo")
    parser.add_argument("--data_path", required=True, help="records with instruction, input, output")
    parser.add_argument(
        "--output_dir", required=True, help="run folder; numbered if it holds something already"
    )
    parser.add_argument("--layers", default="all", help='blocks to edit, e.g. "8;19"')
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--position", default="f1+l1", help="prompt tokens to edit")
    parser.add_argument(
        "--share_weights", action="store_true", help="one intervention for first and last tokens"
    )
    parser.add_argument("--num_train_epochs", type=float, default=1.0)
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    # Flags whose other values would need settings that this example does not have are refused by `choices`.
    parser.add_argument(
        "--evaluation_strategy", choices=["no"], default="no", help="there is no validation set here"
    )
    parser.add_argument("--save_strategy", choices=["no", "epoch"], default="no", help="checkpoints")
    parser.add_argument("--logging_steps", type=int, choices=[1], default=1, help="every step is logged")
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--warmup_ratio", type=float, default=0.0)
    parser.add_argument("--lr_scheduler_type", choices=["constant", "linear", "cosine"], default="cosine")
    parser.add_argument("--max_n_train_example", type=int, help="use the first so many records")
    parser.add_argument("--model_max_length", type=int, default=512, help="longest record, in tokens")
    parser.add_argument("--seed", type=int, default=42)
    return to_run(parser.parse_args())


def to_run(args: argparse.Namespace) -> dict[str, Any]:
    """The run that the flags describe."""
    return {
        "model": args.model_name_or_path,
        "data": {
            "train": args.data_path,
            "format": "alpaca",
            "template": "alpaca",
            "max_length": args.model_max_length,
            "max_records": args.max_n_train_example,
        },
        "method": {
            "name": "loreft",
            "layers": args.layers,
            "rank": args.rank,
            "position": args.position,
            "tied": args.share_weights,
        },
        "train": {
            "epochs": args.num_train_epochs,
            "micro_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "learning_rate": args.learning_rate,
            "optimizer": {"weight_decay": args.weight_decay},
            "schedule": {"name": args.lr_scheduler_type, "warmup_share": args.warmup_ratio},
            "seed": args.seed,
        },
        "eval": {"micro_batch_size": args.per_device_eval_batch_size},
        "output": {"dir": free_folder(args.output_dir), "checkpoints": args.save_strategy != "no"},
    }


def free_folder(wanted: str) -> str:
    """The folder, or the first of wanted-2, wanted-3, ... that is free: no earlier run is lost."""
    folder, number = Path(wanted), 2
    while folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        folder = Path(wanted).with_name(f"{Path(wanted).name}-{number}")
        number += 1
    return str(folder)
