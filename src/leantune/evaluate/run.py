"""Scoring a loaded model on records: read, render as in training, measure the loss, answer, judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from leantune.checkpoint.run_folder import RunFolder
from leantune.checkpoint.trained import Trained
from leantune.data.encode import EncodingRules, encode_examples
from leantune.data.examples import Example
from leantune.data.formats import read_examples
from leantune.data.readers import Row
from leantune.data.records import EncodedRecords
from leantune.data.sources import open_source, rows_source
from leantune.data.templates import Template, make_template
from leantune.data.text_to_sql import generate as generate_sql
from leantune.errors import ConfigError, DataError
from leantune.evaluate.loss import perplexity
from leantune.evaluate.score import Score, default_metric, known_metric, score
from leantune.generate.decode import generate
from leantune.generate.sampling import Sampling
from leantune.train.forward import mean_loss

LOSS_METRICS = ("loss", "perplexity")


@dataclass(frozen=True)
class Evaluation:
    """What came out: the value of each metric, and the answers that were judged."""

    name: str
    source: str
    num_records: int
    values: dict[str, float]
    answers: list[str] = field(default_factory=list[str])
    scores: dict[str, Score] = field(default_factory=dict[str, Score])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"model": self.name, "data": self.source, "records": self.num_records, **self.values}


def evaluate_model(
    trained: Trained,
    data: str | None = None,
    metrics: Sequence[str] = (),
    *,
    max_records: int | None = None,
    format: str = "auto",
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    max_length: int = 2048,
    micro_batch_size: int = 4,
    batch_size: int = 16,
    sampling: Sampling | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Score a model on a file, a `datasets` folder, a hub id or `text-to-sql` (unseen tables).

    Without `data`, the loss on the run's own validation records is measured. Without
    `metrics`, loss, perplexity and the metric that fits the records' shape are. Raises
    `ConfigError` for an unknown metric, `DataError` for records that lack what it needs.
    """
    for metric in metrics:
        if metric not in LOSS_METRICS:
            known_metric(metric)
    if data is None:
        records = _own_validation(trained, metrics)
        values = _losses(trained, records, metrics or LOSS_METRICS, micro_batch_size)
        return Evaluation(trained.name, "the run's validation records", len(records), values)
    rows = _rows(data, split, max_records)
    name, examples = _examples(data, rows, format, columns)
    wanted = tuple(metrics) or (*LOSS_METRICS, default_metric([row.values for row in rows]))
    template = _template(trained, name)
    values: dict[str, float] = {}
    if set(wanted) & set(LOSS_METRICS):
        encoded = encode_examples(
            examples, template, EncodingRules(max_length, "truncate", "answer"), source=data
        )
        values |= _losses(trained, encoded, wanted, micro_batch_size)
    judged = [metric for metric in wanted if metric not in LOSS_METRICS]
    answers: list[str] = []
    scores: dict[str, Score] = {}
    if judged:
        answers = generate(
            trained.model,
            trained.tokenizer,
            [template.prompt(example) for example in examples],
            sampling or Sampling(),
            attached=trained.attached,
            stop_token_ids=template.stop_token_ids,
            batch_size=batch_size,
            on_progress=on_progress,
        )
        for metric in judged:
            scores[metric] = score(metric, [row.values for row in rows], answers, source=data)
            values[metric] = scores[metric].value
    return Evaluation(trained.name, data, len(rows), values, answers, scores)


def _own_validation(trained: Trained, metrics: Sequence[str]) -> EncodedRecords:
    path = RunFolder.open(trained.name).records / "validation.safetensors" if trained.config else None
    if path is None or not path.exists():
        raise ConfigError(f"{trained.name} has no validation records of its own; name records with --data")
    others = [metric for metric in metrics if metric not in LOSS_METRICS]
    if others:
        raise ConfigError(f"{', '.join(others)}: needs the records themselves; name them with --data")
    return EncodedRecords.load(path)


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
    if trained.template.format == format:
        return trained.template
    return make_template(trained.template_name, format, trained.tokenizer, system=trained.template.system)


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
        autocast=False,
    )
    values = {"loss": loss, "perplexity": perplexity(loss)}
    return {name: value for name, value in values.items() if name in wanted}
