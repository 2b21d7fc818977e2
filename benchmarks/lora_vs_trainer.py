"""LoRA in leantune against PEFT + transformers' Trainer: real tokens/s and peak memory, as ratios.

    uv run python benchmarks/lora_vs_trainer.py            # about 10 minutes on 2 cores

Both sides train the same encoded records (Alpaca-like lengths, or --data FILE) with LoRA
r 16 on all linear layers of SmolLM2-135M, fp32, 2 threads, batch 8. The Trainer does what it
does by default: random batches, padded to their longest record. Sides alternate, each round
in a fresh process; speed counts real tokens only; peak memory is what comes on top of the
resident size after imports and weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from leantune.cli.allocator import tune_allocator

from measure import alpaca_like, child, reset_peak, status_kib, table

RANK, ALPHA, BATCH, RATE = 16, 32.0, 8, 1e-3


def leantune_side(data: str, records: int, max_length: int) -> dict[str, Any]:
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
                "micro_batch_size": BATCH,
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


def trainer_side(data: str, records: int, max_length: int) -> dict[str, Any]:
    """PEFT's model in transformers' Trainer, on the records that leantune encodes."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from leantune.config.schema import DataSection
    from leantune.data.prepare import prepare_data
    from leantune.models.source import load_tokenizer, resolve_model

    source = resolve_model("demo")
    tokenizer = load_tokenizer(source)
    section = DataSection(train=data, max_records=records, max_length=max_length, template="alpaca")
    encoded = prepare_data(section, tokenizer, 0).train
    features = []
    for index in range(len(encoded)):
        record = encoded[index]
        labels = [int(t) if s else -100 for t, s in zip(record.tokens, record.supervised, strict=True)]
        features.append({"input_ids": record.tokens.tolist(), "labels": labels})
    model = AutoModelForCausalLM.from_pretrained(source.location, dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    base = reset_peak()

    class Clock(TrainerCallback):
        tokens = 0
        times: list[float] = []  # noqa: RUF012
        counts: list[int] = []  # noqa: RUF012

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.times.append(time.perf_counter())
            self.counts.append(self.tokens)

    clock = Clock()
    padder = DataCollatorForSeq2Seq(tokenizer, padding=True)

    def collate(items: list[dict[str, Any]]) -> Any:
        clock.tokens += sum(len(item["input_ids"]) for item in items)
        return padder(items)

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
        trainer = Trainer(model, arguments, train_dataset=features, data_collator=collate, callbacks=[clock])
        loss = trainer.train().training_loss
    spent = clock.times[-1] - clock.times[0]
    # The loader collates one batch ahead: the count at the end of a step includes the next batch.
    tokens = clock.counts[-1] - clock.counts[0]
    peak = status_kib("VmHWM") - base
    return {
        "tokens_per_second": tokens / spent,
        "peak_gib": peak / 2**20,
        "loss": loss,
        "steps": len(clock.times) - 1,
    }


SIDES = {"leantune": leantune_side, "trainer": trainer_side}


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
        if args.side == "leantune":
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
    ratio = speed["leantune"] / speed["trainer"]
    print(f"\nreal tokens/s: {ratio:.2f} times the Trainer's (goal: at least 2.2)")
    print(f"peak memory: {peak['leantune'] / peak['trainer']:.2f} times the Trainer's (goal: at most 0.6)")


if __name__ == "__main__":
    main()
