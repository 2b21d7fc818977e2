"""LoReFT on Alpaca in one process.

    python train.py --model_name_or_path M --data_path ./alpaca_data.json --output_dir ./out1/ \\
        --layers "8;19" --rank 4 --position "f1+l1" --num_train_epochs 2 \\
        --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --learning_rate 2e-5
"""

import leantune

from arguments import parse

if __name__ == "__main__":
    result = leantune.train(parse())
    if result is not None:
        print(f"run folder: {result.folder}   try: leantune chat {result.folder}")
