"""`leantune quickstart`: a real model learns a real task, with before and after side by side."""

from __future__ import annotations

import argparse
import time
from importlib import resources
from typing import TYPE_CHECKING, Any

from leantune.config import load_config
from leantune.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from leantune.config import RunConfig
    from leantune.evaluate.run import Evaluation

_SHOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Overrides of the recipe, and how many questions are asked."""
    parser.set_defaults(word_list="overrides")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="change the recipe, e.g. method=lora"
    )
    parser.add_argument(
        "--questions", type=int, default=64, metavar="N", help="held-out questions (default %(default)s)"
    )
    parser.add_argument("--print-recipe", action="store_true", help="print the run file and leave")


def run(args: argparse.Namespace) -> int:
    """Ask, train, ask again, show."""
    recipe = resources.files("leantune.recipes") / "quickstart.yaml"
    if args.print_recipe:
        print(recipe.read_text(encoding="utf-8"), end="")
        return 0
    if args.questions < _SHOWN:
        raise ConfigError(f"--questions: {args.questions} is too few; ask at least {_SHOWN}")
    with resources.as_file(recipe) as path:
        config = load_config(path, args.overrides)
    if config.data.train != "text-to-sql":
        raise ConfigError("data.train: quickstart is about text-to-sql; use `leantune train` for other data")
    return _quickstart(config, args.questions)


def _quickstart(config: RunConfig, questions: int) -> int:
    from rich.console import Console

    from leantune import api
    from leantune.checkpoint.run_folder import RunFolder
    from leantune.train.meters import memory_baseline, peak_memory_gib

    console = Console()
    started = time.perf_counter()
    memory_baseline()
    console.rule("1 of 3: the untouched model")
    before = _ask(console, config.model.name, config, questions)
    console.rule("2 of 3: training")
    result = api.train(config, name="quickstart")
    if result is None:
        return 1
    console.rule("3 of 3: the trained model")
    after = _ask(console, str(result.folder), config, questions)

    folder = RunFolder.open(result.folder)
    comparison = _side_by_side(before, after, 12)
    folder.samples.write_text(comparison.markdown(), encoding="utf-8")
    numbers = {
        **folder.read_json("result.json"),
        "accuracy_before": before.values["sql_execution"],
        "accuracy_after": after.values["sql_execution"],
        "questions": questions,
        "train_seconds": result.seconds,
        "seconds": time.perf_counter() - started,
        "peak_memory_gib": max(result.peak_memory_gib, peak_memory_gib("cpu")),
    }
    folder.write_json("result.json", numbers)
    console.rule("before and after")
    console.print(_side_by_side(before, after, _SHOWN).terminal())
    _summary(console, numbers, result.trainable_parameters)
    return 0


def _ask(console: Console, model: str, config: RunConfig, questions: int) -> Evaluation:
    """Put the held-out questions to a model and run the SQL that it writes."""
    from leantune import api
    from leantune.generate.sampling import Sampling

    with console.status(f"asking {questions} questions about tables that training never shows") as status:
        loaded = api.load(model, system=config.data.system)
        evaluation = api.evaluate(
            loaded,
            "text-to-sql",
            ["sql_execution"],
            max_records=questions,
            batch_size=32,
            sampling=Sampling(max_new_tokens=40),
            on_progress=lambda done, total: status.update(f"{done} of {total} questions answered"),
        )
    judged = evaluation.scores["sql_execution"]
    console.print(
        f"{model}: {judged.correct} of {judged.total} queries give the right result when run in SQLite"
    )
    return evaluation


def _side_by_side(before: Evaluation, after: Evaluation, count: int) -> Any:
    """The first questions, with the wanted query and both answers."""
    from leantune.data.text_to_sql import generate
    from leantune.evaluate.compare import compare

    rows = generate(count, 0, "eval")
    count = min(count, len(before.answers))
    prompts = [f"{row['question']}\n{row['context']}" for row in rows[:count]]
    right = {"before": before.scores["sql_execution"], "after": after.scores["sql_execution"]}
    answers = {"before": before.answers, "after": after.answers}
    columns = {"wanted": [row["answer"] for row in rows[:count]]} | {
        name: [
            f"{'✓' if right[name].per_record[i] else '✗'} {answers[name][i].strip()}" for i in range(count)
        ]
        for name in ("before", "after")
    }
    return compare(prompts, columns, title="Text to SQL on unseen tables", marked=False)


def _summary(console: Console, numbers: dict[str, Any], trained: int) -> None:
    from rich.table import Table

    table = Table(title="execution accuracy: the query is run, its result compared")
    for name in ("", "before", "after"):
        table.add_column(name, justify="right")
    before, after = 100 * numbers["accuracy_before"], 100 * numbers["accuracy_after"]
    table.add_row(f"{numbers['questions']} questions", f"{before:.1f} %", f"[bold green]{after:.1f} %")
    console.print(table)
    folder = numbers["folder"]
    console.print(
        f"{trained:,} parameters trained in {numbers['train_seconds']:.0f} s "
        f"({numbers['tokens_per_second']:.0f} tokens/s), {numbers['seconds']:.0f} s in all, "
        f"peak memory {numbers['peak_memory_gib']:.2f} GiB"
    )
    console.print(
        f"saved in {folder}: run.yaml, metrics.jsonl, adapter/, checkpoints/, samples.md, result.json"
    )
    console.print("next:", style="bold")
    for line in (
        f"leantune eval {folder} --data text-to-sql --max-records 200",
        "leantune quickstart --print-recipe > my.yaml   # then change a word: method: lora",
        "leantune train my.yaml strategy.devices=2      # the same losses on two processes",
        "leantune train --help                          # every key",
    ):
        console.print(f"  {line}", highlight=False, markup=False)
