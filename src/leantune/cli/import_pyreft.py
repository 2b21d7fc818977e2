"""`leantune import-pyreft DIR --out FOLDER`."""

from __future__ import annotations

import argparse

from leantune.config.grid import REFT_METHODS
from leantune.config.positions import CONVENTIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The folders, and what pyreft does not store."""
    parser.add_argument(
        "folder", metavar="DIR", help="folder that pyreft saved, or a checkpoint of its trainer"
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="new adapter folder")
    parser.add_argument(
        "--position", metavar="POS", help="which tokens were edited, such as f1+l1; not stored"
    )
    parser.add_argument(
        "--positions-convention",
        choices=CONVENTIONS,
        help="pyreft-alpaca: its l1 was the last but one prompt token, as in that script (default: standard)",
    )
    parser.add_argument("--activation", metavar="NAME", help="its act_fn, if not linear; not stored")
    parser.add_argument("--dropout", type=float, metavar="P", help="its dropout, if not 0; not stored")
    parser.add_argument("--base", metavar="MODEL", help="base model, which the adapter must fit")
    parser.add_argument(
        "--layers", metavar="LIST", help="its layers, such as 8;19; needed without a config.json"
    )
    parser.add_argument(
        "--kind", choices=REFT_METHODS, help="its class, if there is no config.json that says so"
    )


def run(args: argparse.Namespace) -> int:
    """Read, check, write, say so."""
    from leantune import api

    lines = api.import_pyreft(
        args.folder,
        args.out,
        base=args.base,
        layers=args.layers,
        position=args.position,
        positions_convention=args.positions_convention,
        kind=args.kind,
        activation=args.activation,
        dropout=args.dropout,
    )
    for line in lines:
        print(line)
    return 0
