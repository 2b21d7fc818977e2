"""`leantune compare --prompts FILE base RUN_A RUN_B ...`."""

from __future__ import annotations

import argparse
from pathlib import Path

from leantune.cli.sampling import add_sampling_arguments, edits_from, sampling_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompts and the models."""
    parser.set_defaults(word_list="models")
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="runs, adapter or model folders, hub ids; `base`: the model under the first run",
    )
    parser.add_argument("--prompts", metavar="FILE", help=".txt, .json or .jsonl file of prompts")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated"
    )
    parser.add_argument(
        "--base", metavar="MODEL", help="what `base` stands for; default: what the first run says"
    )
    parser.add_argument(
        "--html", default="compare.html", metavar="FILE", help="the page to write (default %(default)s)"
    )
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the prompts with each model, print a table, write one HTML file."""
    from rich.console import Console

    from leantune import api
    from leantune.checkpoint.atomic import write_file
    from leantune.errors import ConfigError
    from leantune.evaluate.prompts import read_prompts

    sampling, edits = sampling_from(args), edits_from(args)
    prompts = list(args.prompt) + (read_prompts(args.prompts) if args.prompts else [])
    if not prompts:
        raise ConfigError("no prompts: give --prompts FILE or --prompt TEXT")
    comparison = api.compare(prompts, args.models, sampling, base=args.base, edits=edits)
    Console().print(comparison.terminal())
    write_file(Path(args.html), comparison.html().encode())
    print(f"wrote {args.html}")
    return 0
