"""`leantune expand MODEL --blocks k --out DIR`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the number of new blocks and the new folder."""
    parser.add_argument("model", metavar="MODEL", help="local folder, hub id, or demo")
    parser.add_argument(
        "--blocks",
        type=int,
        required=True,
        metavar="K",
        help="new blocks, spread evenly (1 to the model's own)",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder for the expanded model")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub model")


def run(args: argparse.Namespace) -> int:
    """Expand, check, say so."""
    from leantune import api

    for line in api.expand(args.model, args.out, blocks=args.blocks, revision=args.revision):
        print(line)
    return 0
