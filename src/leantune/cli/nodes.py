"""The options of `train` and `resume` for runs on several machines, named as torchrun names them."""

from __future__ import annotations

import argparse


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """--nnodes, --node_rank, --rdzv_endpoint (dashes are accepted too)."""
    group = parser.add_argument_group("several machines (start the same command on each)")
    group.add_argument("--nnodes", "--nodes", type=int, metavar="N", help="machines (strategy.nodes)")
    group.add_argument(
        "--node_rank", "--node-rank", type=int, default=0, metavar="I", help="number of this machine, from 0"
    )
    group.add_argument(
        "--rdzv_endpoint", "--rdzv-endpoint", metavar="HOST:PORT", help="a free port of machine 0"
    )


def node_overrides(args: argparse.Namespace) -> list[str]:
    """The override that --nnodes stands for."""
    return [f"strategy.nodes={args.nnodes}"] if args.nnodes else []
