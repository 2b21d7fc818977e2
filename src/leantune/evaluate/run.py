"""Scoring a loaded model on records: read, render as in training, measure the loss, answer, judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from leantune.checkpoint.trained import Trained
from leantune.data.encode import EncodingRules, encode_examples
from leantune.data.examples import Example
from leantune.data.formats import read_examples
from leantune.data.readers import Row
from leantune.data.records import DataFacts, EncodedRecords
from leantune.data.sources import open_source, rows_source
from leantune.data.templates import Template, make_template
from leantune.data.text_to_sql import generate as generate_sql
from leantune.errors import ConfigError, DataError
from leantune.evaluate.score import Score, default_metric, judges_for, known_metric, score
from leantune.generate.decode import generate
from leantune.generate.sampling import Sampling
from leantune.train.forward import mean_loss, perplexity

LOSS_METRICS = ("loss", "perplexity")
# Longest record in tokens, for a model that comes from no run.
_MAX_LENGTH = 2048


@dataclass(frozen=True)
class Evaluation:
    """What came out: the value of each metric, and the answers that were judged.

    `facts`: which records the loss is the mean of; None if it was not asked for.
    """

    name: str
    source: str
    num_records: int
    values: dict[str, float]
    answers: list[str] = field(default_factory=list[str])
    scores: dict[str, Score] = field(default_factory=dict[str, Score])
    facts: DataFacts | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = {"model": self.name, "data": self.source, "records": self.num_records, **self.values}
        if self.facts is not None:
            plain["loss_records"] = {
                "kept": self.facts.num_kept,
                "truncated": self.facts.num_truncated,
                "dropped": self.facts.dropped,
            }
        return plain


def evaluate_model(
    trained: Trained,
    data: str | None = None,
    metrics: Sequence[str] = (),
    *,
    max_records: int | None = None,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    max_length: int | None = None,
    micro_batch_size: int = 4,
    batch_size: int = 16,
    sampling: Sampling | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Score a model on a file, a `datasets` folder, a hub id or `text-to-sql` (unseen tables).

    Without `data`, the loss on the run's own validation records is measured. Without
    `metrics`, loss, perplexity and, if there are answers, the metric that fits the records' shape
    are. The loss counts what the run's own loss counted (data.train_on, max_length, too_long).
    Raises `ConfigError` for an unknown metric, `DataError` for records that lack what it needs.
    """
    judged = [known_metric(metric) for metric in metrics if metric not in LOSS_METRICS]
    if data is None:
        _refuse_choices(judged, max_records, format != "auto", columns, split, max_length)
        return _on_own_validation(trained, metrics or LOSS_METRICS, micro_batch_size)
    rows = _rows(data, split, max_records)
    name, examples = _examples(data, rows, format, columns)
    records = [{**row.values, **example.fields} for row, example in zip(rows, examples, strict=True)]
    gold = [example.answer for example in examples]
    if not metrics:
        judged = [default_metric(records)] if any(gold) else []
    judges = {metric: judges_for(metric, records, gold, source=data) for metric in judged}
    template = _template(trained, name)
    values, facts = dict[str, float](), None
    if not metrics or set(metrics) & set(LOSS_METRICS):
        encoded = encode_examples(examples, template, _rules(trained, max_length), source=data)
        values, facts = _losses(trained, encoded, metrics or LOSS_METRICS, micro_batch_size), encoded.facts
    answers = list[str]()
    if judges:
        prompts = [template.prompt(example) for example in examples]
        answers = _answers(trained, template, prompts, sampling, batch_size, on_progress)
    scores = {metric: score(metric, judges[metric], answers) for metric in judged}
    values |= {metric: result.value for metric, result in scores.items()}
    return Evaluation(trained.name, data, len(rows), values, answers, scores, facts)


def _refuse_choices(judged: Sequence[str], *choices: object) -> None:
    """The run's own validation records are encoded already: nothing about them can be chosen."""
    if judged:
        raise ConfigError(f"{', '.join(judged)}: needs the records themselves; name them with --data")
    if any(choices):
        raise ConfigError(
            "max_records, format, columns, split and max_length are about records that are named; name "
            "them with --data, or leave these out"
        )


def _on_own_validation(trained: Trained, wanted: Sequence[str], micro_batch_size: int) -> Evaluation:
    path = trained.run.records / "validation.safetensors" if trained.run else None
    if path is None or not path.exists():
        raise ConfigError(f"{trained.name} has no validation records of its own; name records with --data")
    records = EncodedRecords.load(path)
    values = _losses(trained, records, wanted, micro_batch_size)
    name = "the run's validation records"
    return Evaluation(trained.name, name, len(records), values, facts=replace(records.facts, source=name))


def _rows(data: str, split: str | None, max_records: int | None) -> list[Row]:
    if data == "text-to-sql":
        if split not in (None, "eval"):
            raise ConfigError("split: text-to-sql is always evaluated on its unseen tables; leave it out")
        return list(rows_source(data, list(generate_sql(max_records or 128, 0, "eval"))).rows())
    options = {"split": split} if split else {}
    rows = list(islice(open_source(data, **options).rows(), max_records))
    if not rows:
        raise DataError(f"{data} holds no records")
    return rows


def _examples(
    data: str, rows: Sequence[Row], format: str, columns: Mapping[str, str] | None
) -> tuple[str, list[Example]]:
    try:
        name, examples = read_examples(rows, format, columns, require_answer=False)
        return name, list(examples)
    except DataError as error:
        raise DataError(f"{data}: {error}") from error


def _template(trained: Trained, format: str) -> Template:
    """The template of the model's own training, for records of this format."""
    if format == "text":  # used as they are, by any model
        return make_template("plain", format, trained.tokenizer)
    if trained.template.format == format:
        return trained.template
    return make_template(trained.template_name, format, trained.tokenizer, system=trained.template.system)


def _rules(trained: Trained, max_length: int | None) -> EncodingRules:
    """What the run's own loss counted, if there is a run."""
    data = trained.config.data if trained.config else None
    rules = (
        EncodingRules(data.max_length, data.too_long, data.train_on) if data else EncodingRules(_MAX_LENGTH)
    )
    return rules if max_length is None else replace(rules, max_length=max_length)


def _answers(
    trained: Trained,
    template: Template,
    prompts: Sequence[str],
    sampling: Sampling | None,
    batch_size: int,
    on_progress: Callable[[int, int], None] | None,
) -> list[str]:
    return generate(
        trained.model,
        trained.tokenizer,
        prompts,
        sampling or Sampling(),
        attached=trained.attached,
        stop_token_ids=template.stop_token_ids,
        batch_size=batch_size,
        on_progress=on_progress,
    )


def _losses(
    trained: Trained, records: EncodedRecords, wanted: Sequence[str], micro_batch_size: int
) -> dict[str, float]:
    loss, _ = mean_loss(
        trained.model,
        trained.attached,
        records,
        device=trained.model.device,
        micro_batch_size=micro_batch_size,
        pad_id=0,
        precision=trained.precision,
    )
    values = {"loss": loss, "perplexity": perplexity(loss)}
    return {name: value for name, value in values.items() if name in wanted}
