"""`leantune schema`: the JSON schema of a run file, for editors."""

from __future__ import annotations

import argparse
from pathlib import Path

from leantune.config.describe import json_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where it goes."""
    parser.add_argument("-o", "--output", metavar="FILE", help="write a file instead of printing")


def run(args: argparse.Namespace) -> int:
    """Print or write the schema."""
    if args.output:
        Path(args.output).write_text(json_schema() + "\n", encoding="utf-8")
    else:
        print(json_schema())
    return 0
