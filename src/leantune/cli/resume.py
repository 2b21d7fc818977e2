"""`leantune resume RUN [strategy.devices=2 ...]`."""

from __future__ import annotations

import argparse

from leantune.cli.nodes import add_node_arguments, node_overrides
from leantune.cli.results import print_result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run folder, and where it goes on."""
    parser.set_defaults(word_list="overrides")
    parser.add_argument("folder", metavar="RUN", help="run folder")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="for example strategy.devices=2"
    )
    add_node_arguments(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress on the terminal")


def run(args: argparse.Namespace) -> int:
    """Continue from the newest complete checkpoint."""
    from leantune import api

    overrides = [*args.overrides, *node_overrides(args)]
    node = {"node_rank": args.node_rank, "rdzv_endpoint": args.rdzv_endpoint}
    return print_result(api.resume(args.folder, overrides, quiet=args.quiet, **node))
