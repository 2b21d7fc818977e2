"""`leantune export RUN --format pyreft --out DIR`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the format and the new folder."""
    parser.add_argument("model", metavar="RUN", help="run or adapter folder (a ReFT method)")
    parser.add_argument("--format", required=True, choices=("pyreft",), help="whose files to write")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder")


def run(args: argparse.Namespace) -> int:
    """Write, read again, say so."""
    from leantune import api

    for line in api.export(args.model, args.out, format=args.format):
        print(line)
    return 0
