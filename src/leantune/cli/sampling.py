"""The options that `generate`, `chat`, `eval` and `compare` share: the model, how it decodes and edits."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leantune.generate.edits import EditSettings
    from leantune.generate.sampling import Sampling


def add_sampling_arguments(parser: argparse.ArgumentParser, max_new_tokens: int = 256) -> None:
    """Greedy by default; a temperature turns sampling on. Interventions act as trained by default."""
    group = parser.add_argument_group("decoding (greedy unless a temperature is given)")
    group.add_argument(
        "--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help="default %(default)s"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens up to P"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens")
    group.add_argument("--num-beams", type=int, default=1, metavar="N", help="beam search")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    group.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    group = parser.add_argument_group("interventions (ReFT; as trained unless something is given)")
    group.add_argument(
        "--strength", type=float, default=1.0, metavar="X", help="factor of what they add; 0: untouched model"
    )
    group.add_argument(
        "--subspaces",
        metavar="LIST",
        help="names of method.subspaces and dimensions that act alone, such as formal,sql",
    )
    group.add_argument(
        "--edit-tokens",
        choices=("prompt", "all", "new"),
        help="edit the prompt (at its positions), every token after it too (all), or those alone (new)",
    )


def sampling_from(args: argparse.Namespace) -> Sampling:
    """The decoding that the options ask for; raises `ConfigError` listing every bad value."""
    from leantune.generate.sampling import Sampling

    return Sampling(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        num_beams=args.num_beams,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )


def edits_from(args: argparse.Namespace) -> EditSettings:
    """How interventions act, as the options ask for; raises `ConfigError` listing every bad value."""
    from leantune.generate.edits import EditSettings

    return EditSettings(args.strength, args.subspaces, args.edit_tokens)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What is loaded, and on what."""
    parser.add_argument("--base", metavar="MODEL", help="base model of an adapter folder, if it has moved")
    parser.add_argument(
        "--template", metavar="NAME", help="chat, alpaca, plain or a Jinja file; default: the run's"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
