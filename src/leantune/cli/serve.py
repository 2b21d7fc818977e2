"""`leantune serve RUN...`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The models, the address, and how much is answered at once."""
    parser.set_defaults(word_list="runs")
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run or adapter folder, or NAME=RUN to choose its model name; or one whole model",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 is any free one (default %(default)s)")
    parser.add_argument(
        "--max-batch", type=int, default=8, metavar="N", help="requests answered together (%(default)s)"
    )
    parser.add_argument(
        "--max-queue", type=int, default=64, metavar="N", help="requests that may wait (%(default)s)"
    )
    parser.add_argument(
        "--max-wait-ms", type=float, default=10.0, metavar="MS", help="wait for company (%(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=512,
        metavar="N",
        help="length of answers to requests that do not say (%(default)s)",
    )
    parser.add_argument("--base", metavar="MODEL", help="base model of the adapters, if it has moved")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")


def run(args: argparse.Namespace) -> int:
    """Load the models, and answer until Ctrl-C."""
    from leantune.serve.server import announcement, listen, make_server, require_packages

    require_packages()
    from leantune.serve.app import make_app
    from leantune.serve.engine import Engine, Limits
    from leantune.serve.models import load_served, named_runs

    limits = Limits(args.max_batch, args.max_queue, args.max_wait_ms, args.max_new_tokens)
    with listen(args.host, args.port) as listener:
        served = load_served(named_runs(args.runs), args.base, args.device)
        app = make_app(Engine(served, limits))
        print("\n".join(announcement(listener, args.host, served.models)), flush=True)
        try:
            make_server(app).run(sockets=[listener])
        except KeyboardInterrupt:  # a signal that the server has obeyed, and passes on
            print("stopped")
    return 0
