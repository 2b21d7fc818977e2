"""`leantune rank RUN`: the work of one process; `train` and `resume` start it, people do not."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run folder that the starting process has prepared."""
    parser.add_argument("folder", metavar="RUN")
    parser.add_argument("--quiet", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Join the other ranks and train."""
    from leantune.train.session import run_rank

    run_rank(args.folder, args.quiet)
    return 0
