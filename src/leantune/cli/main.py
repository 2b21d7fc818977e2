"""`leantune VERB ...`: finds the verb, turns expected errors into one message and an exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from leantune.cli.allocator import tune_allocator
from leantune.errors import ConfigError, LeantuneError

# verb -> (module of leantune.cli, one line of help)
VERBS = {
    "quickstart": ("quickstart", "fine-tune the demo model on text-to-SQL and show before and after"),
    "train": ("train", "train as a run file says"),
    "resume": ("resume", "continue an interrupted run"),
    "eval": ("evaluate", "score a run or model on records"),
    "generate": ("generate", "answer prompts"),
    "serve": ("serve", "answer OpenAI's clients: one base model, adapters picked by model name"),
    "chat": ("chat", "talk with a run or model"),
    "compare": ("compare", "answers of several runs and models side by side"),
    "merge": ("merge", "write an adapter's weights into a copy of its model"),
    "expand": ("expand", "write a copy of a model with new blocks that add nothing yet (Llama-Pro)"),
    "import-pyreft": ("import_pyreft", "write a folder that pyreft saved as an adapter"),
    "export": ("export", "write a ReFT adapter as pyreft saves one"),
    "schema": ("schema", "print the JSON schema of a run file, for editors"),
    "rank": ("rank", argparse.SUPPRESS),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0, 1 (failed) or 2 (the request itself is wrong)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="leantune", description="Fine-tune large language models on the hardware you have."
    )
    shown = [verb for verb, (_, text) in VERBS.items() if text is not argparse.SUPPRESS]
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{" + ",".join(shown) + "}")
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    for verb, (module, text) in VERBS.items():
        options: dict[str, Any] = {} if text is argparse.SUPPRESS else {"help": text}
        subparser = verbs.add_parser(
            verb, description=text, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )
        if verb == chosen:
            implementation = importlib.import_module(f"leantune.cli.{module}")
            implementation.add_arguments(subparser)
            subparser.set_defaults(run=implementation.run)
    parsed, rest = parser.parse_known_args(arguments)
    # argparse ends a list of words at the first option; what stands behind it belongs to the list too.
    words = getattr(parsed, getattr(parsed, "word_list", ""), None)
    if rest and (words is None or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if words is not None:
        words.extend(rest)
    if argv is None and parsed.verb not in ("schema", "merge", "expand", "import-pyreft", "export"):
        tune_allocator()  # may start this process anew, so only if the command line is its own
    try:
        return int(parsed.run(parsed) or 0)
    except LeantuneError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # under torchrun every rank finds the same
            print(f"leantune {parsed.verb}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # `leantune ... | head`
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
