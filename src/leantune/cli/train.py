"""`leantune train [--preset NAME] [run.yaml] [section.key=value ...]`."""

from __future__ import annotations

import argparse
import os

from leantune.cli.nodes import add_node_arguments, node_overrides
from leantune.cli.results import print_result
from leantune.config import load_config
from leantune.config.describe import help_text
from leantune.config.presets import preset_table_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run file and overrides; the help lists every key."""
    parser.set_defaults(word_list="overrides")
    parser.add_argument("config", nargs="?", metavar="run.yaml", help="run file; may be left out")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that win over the file"
    )
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help="a method and a base by one name, such as qlora; see below",
    )
    add_node_arguments(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress on the terminal")
    parser.description = "Train as a run file says. Every key can be given as section.key=value."
    parser.epilog = (
        "presets (--preset NAME); they win over the run file, and section.key=value wins over them:\n\n"
        f"{preset_table_text()}\n\nkeys of a run file, with their defaults:\n\n{help_text()}"
    )


def run(args: argparse.Namespace) -> int:
    """Validate, then train; configuration errors come before torch is imported."""
    overrides = [*args.overrides, *node_overrides(args)]
    path = args.config
    if path is not None and "=" in path and not os.path.exists(path):
        path, overrides = None, [path, *overrides]
    config = load_config(path, overrides, os.environ, args.preset)
    from leantune import api

    name = os.path.splitext(os.path.basename(path))[0] if path else args.preset or config.method.name
    node = {"node_rank": args.node_rank, "rdzv_endpoint": args.rdzv_endpoint}
    return print_result(api.train(config, name=name, quiet=args.quiet, **node))
