"""LoRA in leantune against PEFT + transformers' Trainer: real tokens/s and peak memory, as ratios.

    uv run python benchmarks/lora_vs_trainer.py            # about 10 minutes on 2 cores

Both sides train the same encoded records (Alpaca-like lengths, or --data FILE) with LoRA
r 16 on all linear layers of SmolLM2-135M, fp32, 2 threads, batch 8. The Trainer does what it
does by default: random batches, padded to their longest record. Sides alternate, each round
in a fresh process; speed counts real tokens only; peak memory is what comes on top of the
resident size after imports and weights. The third side takes the same steps of 8 records in
passes of 4, leantune's default.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from leantune.cli.allocator import tune_allocator
from leantune.config.schema import DataSection
from leantune.data.prepare import prepare_data
from leantune.models.source import load_tokenizer, resolve_model

from measure import alpaca_like, child, reset_peak, status_kib, table

RANK, ALPHA, BATCH, RATE = 16, 32.0, 8, 1e-3


def leantune_side(data: str, records: int, max_length: int, micro: int = BATCH) -> dict[str, Any]:
    """`leantune.train` as anybody would call it; the first step warms up and is not counted."""
    from leantune import api
    from leantune.train import assemble

    build = assemble._build_model
    base: list[int] = []

    def measured(*args: Any) -> Any:
        parts = build(*args)
        base.append(reset_peak())
        return parts

    assemble._build_model = measured
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "model": "demo",
            "data": {"train": data, "max_records": records, "max_length": max_length, "template": "alpaca"},
            "method": {"name": "lora", "rank": RANK, "alpha": ALPHA},
            "train": {
                "learning_rate": RATE,
                "micro_batch_size": micro,
                "global_batch_size": BATCH,
                "max_steps": max(2, records // BATCH),
            },
            "output": {"dir": f"{folder}/run", "checkpoints": False},
        }
        api.train(config, notify=rows.append, quiet=True)
    rows = rows[1:]
    tokens, spent = sum(r["total_tokens"] for r in rows), rows[-1]["seconds"] - rows[0]["seconds"]
    tokens -= rows[0]["total_tokens"]
    peak = status_kib("VmHWM") - base[0]
    return {
        "tokens_per_second": tokens / spent,
        "peak_gib": peak / 2**20,
        "loss": rows[-1]["loss"],
        "steps": len(rows),
    }


def trainer_features(data: str, records: int, max_length: int) -> list[dict[str, Any]]:
    """The records that leantune encodes, as the Trainer wants them (-100 where there is no loss)."""
    section = DataSection(train=data, max_records=records, max_length=max_length, template="alpaca")
    encoded = prepare_data(section, load_tokenizer(resolve_model("demo")), 0).train
    return [
        {
            "input_ids": record.tokens.tolist(),
            "labels": [int(t) if s else -100 for t, s in zip(record.tokens, record.supervised, strict=True)],
        }
        for record in (encoded[index] for index in range(len(encoded)))
    ]


def trainer_side(data: str, records: int, max_length: int) -> dict[str, Any]:
    """PEFT's model in transformers' Trainer; the first step warms up and is not counted."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    source = resolve_model("demo")
    model = AutoModelForCausalLM.from_pretrained(source.location, dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    base = reset_peak()
    tokens, marks = [0], list[tuple[float, int]]()
    padder = DataCollatorForSeq2Seq(load_tokenizer(source), padding=True)

    def collate(items: list[dict[str, Any]]) -> Any:
        tokens[0] += sum(len(item["input_ids"]) for item in items)
        return padder(items)

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            # The loader collates one batch ahead; over the run that evens out.
            marks.append((time.perf_counter(), tokens[0]))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=max(2, records // BATCH),
            learning_rate=RATE,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
        )
        features = trainer_features(data, records, max_length)
        loss = Trainer(model, arguments, collate, features, callbacks=[Clock()]).train().training_loss
    (first, before), (last, after) = marks[0], marks[-1]
    return {
        "tokens_per_second": (after - before) / (last - first),
        "peak_gib": (status_kib("VmHWM") - base) / 2**20,
        "loss": loss,
        "steps": len(marks) - 1,
    }


SIDES = {
    "leantune": leantune_side,
    "trainer": trainer_side,
    "leantune, passes of 4": functools.partial(leantune_side, micro=4),
}


def main() -> None:
    """Alternate the sides and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="alpaca records; default: generated ones of Alpaca's shape")
    parser.add_argument("--records", type=int, default=96)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        if args.side != "trainer":
            tune_allocator()  # as the command line does
        import torch

        torch.set_num_threads(2)
        print(json.dumps(SIDES[args.side](args.data, args.records, args.max_length)))
        return
    with tempfile.TemporaryDirectory() as folder:
        data = args.data or str(alpaca_like(Path(folder) / "records.json", args.records))
        common = ["--data", data, "--records", str(args.records), "--max-length", str(args.max_length)]
        rows = [
            {"side": side, **child(__file__, [*common, "--side", side], {"OMP_NUM_THREADS": "2"})}
            for _ in range(args.rounds)
            for side in SIDES
        ]
    print(table(rows))
    speed = {s: statistics.median(r["tokens_per_second"] for r in rows if r["side"] == s) for s in SIDES}
    peak = {s: statistics.median(r["peak_gib"] for r in rows if r["side"] == s) for s in SIDES}
    for side in ("leantune", "leantune, passes of 4"):
        faster, smaller = speed[side] / speed["trainer"], peak[side] / peak["trainer"]
        print(f"\n{side}: {faster:.2f} times the Trainer's real tokens/s (goal: at least 2.2)")
        print(f"{side}: {smaller:.2f} times the Trainer's peak memory (goal: at most 0.6)")


if __name__ == "__main__":
    main()
