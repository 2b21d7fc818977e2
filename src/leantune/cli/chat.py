"""`leantune chat RUN`."""

from __future__ import annotations

import argparse
import sys

from leantune.cli.sampling import add_model_arguments, add_sampling_arguments, edits_from, sampling_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model and how it answers."""
    parser.add_argument("model", metavar="RUN", help="run, adapter or model folder, hub id, or demo")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_model_arguments(parser)
    add_sampling_arguments(parser, max_new_tokens=512)


def run(args: argparse.Namespace) -> int:
    """Read lines, stream answers."""
    from leantune import api
    from leantune.generate.chat import ChatSession, run_chat
    from leantune.methods.head import refuse_writing

    sampling, edits = sampling_from(args), edits_from(args)
    parts = api.load(
        args.model, base=args.base, device=args.device, template=args.template, system=args.system
    ).trained
    refuse_writing(parts.attached)
    session = ChatSession(
        parts.model,
        parts.tokenizer,
        sampling,
        parts.template.conversation_prompt,
        attached=parts.attached,
        system=parts.template.system,
        stop_token_ids=parts.template.stop_token_ids,
        edits=edits,
    )

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    run_chat(session, lambda: input("> " if sys.stdin.isatty() else ""), write)
    return 0
