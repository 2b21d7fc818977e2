"""`leantune eval RUN --data FILE`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from leantune.cli.sampling import add_model_arguments, add_sampling_arguments, edits_from, sampling_from

METRICS = "loss, perplexity, accuracy, margin, exact_match, sql_execution, choice, gsm8k"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the records, the metrics."""
    parser.add_argument("model", metavar="RUN", help="run, adapter or model folder, hub id, or demo")
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="records (file, folder, hub id, text-to-sql); default: the run's validation records",
    )
    parser.add_argument("--split", metavar="NAME", help="split of a hub data set or folder")
    parser.add_argument("--format", default="auto", help="shape of a record (default: detected)")
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="FIELD=COLUMN",
        help="your column for a field of the format",
    )
    parser.add_argument(
        "--metrics", metavar="LIST", help=f"comma-separated: {METRICS}; default: what fits the records"
    )
    parser.add_argument("--max-records", type=int, metavar="N", help="use the first N records")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="prompts decoded together")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--answers", metavar="FILE", help="write every answer, one JSON object a line")
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Score and print."""
    from leantune import api
    from leantune.data.prepare import describe_source
    from leantune.errors import ConfigError

    sampling, edits = sampling_from(args), edits_from(args)
    columns = dict(part.partition("=")[::2] for part in args.column)
    if any(not value for value in columns.values()):
        raise ConfigError("--column: write FIELD=COLUMN, for example --column instruction=query")
    model = api.load(args.model, base=args.base, device=args.device, template=args.template)
    result = api.evaluate(
        model,
        args.data,
        args.metrics.split(",") if args.metrics else (),
        max_records=args.max_records,
        split=args.split,
        format=args.format,
        columns=columns,
        batch_size=args.batch_size,
        sampling=sampling,
        edits=edits,
    )
    if args.answers:
        right = [list(score.per_record) for score in result.scores.values()]
        rows = [
            json.dumps({"record": i, "answer": answer, "right": [r[i] for r in right]}, ensure_ascii=False)
            for i, answer in enumerate(result.answers)
        ]
        Path(args.answers).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    if args.json:
        print(json.dumps(result.as_dict()))
        return 0
    print(f"{result.name} on {result.num_records} records of {result.source}")
    if result.facts is not None:
        print(f"  loss of {describe_source(result.facts)}")
    for metric, value in result.values.items():
        judged = result.scores.get(metric)
        print(
            f"  {metric}: "
            + (f"{100 * value:.1f} % ({judged.correct} of {judged.total})" if judged else f"{value:.4f}")
        )
    return 0
