"""LoReFT on Alpaca on several devices; torchrun says how many.

torchrun --nproc_per_node 4 train_multigpu.py (the flags of train.py)
"""

import os

import leantune

from arguments import parse

if __name__ == "__main__":
    run = parse()
    run["strategy"] = {"name": "ddp", "devices": int(os.environ.get("WORLD_SIZE", "1"))}
    result = leantune.train(run)
    if result is not None and os.environ.get("RANK", "0") == "0":
        print(f"run folder: {result.folder}   try: leantune chat {result.folder}")
