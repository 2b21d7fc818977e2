"""`leantune generate RUN PROMPT...`."""

from __future__ import annotations

import argparse
import json
import sys

from leantune.cli.sampling import add_model_arguments, add_sampling_arguments, edits_from, sampling_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model and the prompts."""
    parser.set_defaults(word_list="prompts")
    parser.add_argument("model", metavar="RUN", help="run, adapter or model folder, hub id, or demo")
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="prompts; default: one a line of standard input"
    )
    parser.add_argument(
        "--prompts", dest="file", metavar="FILE", help=".txt, .json or .jsonl file of prompts"
    )
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="prompts decoded together")
    parser.add_argument("--json", action="store_true", help="one JSON object a line: prompt and answer")
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer each prompt; a single one is streamed to a terminal."""
    from leantune import api
    from leantune.errors import ConfigError
    from leantune.evaluate.prompts import read_prompts

    sampling, edits = sampling_from(args), edits_from(args)
    prompts = list(args.prompts) + (read_prompts(args.file) if args.file else [])
    if not prompts and not sys.stdin.isatty():
        prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise ConfigError("no prompt: give one as an argument, --prompts FILE, or lines on standard input")
    model = api.load(args.model, base=args.base, device=args.device, template=args.template)
    if len(prompts) == 1 and not args.json and sampling.num_beams == 1:
        for piece in model.stream(prompts[0], sampling, edits=edits):
            print(piece, end="", flush=True)
        print()
        return 0
    answers = model.generate(prompts, sampling, edits=edits, batch_size=args.batch_size)
    for prompt, answer in zip(prompts, answers, strict=True):
        if args.json:
            print(json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False))
        else:
            print(f"> {prompt}\n{answer}\n")
    return 0
