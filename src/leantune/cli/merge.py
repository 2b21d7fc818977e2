"""`leantune merge RUN FOLDER`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run and the new folder."""
    parser.add_argument("model", metavar="RUN", help="run or adapter folder (LoRA or full)")
    parser.add_argument("target", metavar="FOLDER", help="new folder for the merged model")
    parser.add_argument("--base", metavar="MODEL", help="base model of an adapter folder, if it has moved")


def run(args: argparse.Namespace) -> int:
    """Merge, check, say so."""
    from leantune import api

    for line in api.merge(args.model, args.target, base=args.base):
        print(line)
    return 0
