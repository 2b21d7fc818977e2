"""Scoring a loaded model on records: read, render as in training, measure the loss, answer, judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from leantune.checkpoint.trained import Trained
from leantune.config.edit_checks import chosen_subspaces
from leantune.data.encode import EncodingRules, MaskOf, active_dimensions, encode_examples
from leantune.data.examples import Example
from leantune.data.fields import column_of
from leantune.data.formats import read_examples, rendered_as
from leantune.data.markers import Markers
from leantune.data.readers import Row
from leantune.data.records import DataFacts, EncodedRecords
from leantune.data.sources import open_source, rows_source
from leantune.data.templates import Template, make_template
from leantune.data.text_to_sql import generate as generate_sql
from leantune.errors import ConfigError, DataError
from leantune.evaluate.score import Score, default_metric, judges_for, known_metric, score
from leantune.generate.decode import generate
from leantune.generate.edits import AS_TRAINED, EditSettings
from leantune.generate.sampling import Sampling
from leantune.methods.head import head_of
from leantune.train.objectives import NextToken, Objective, objective_of
from leantune.train.validation import mean_loss

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
    edits: EditSettings = AS_TRAINED,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Score a model on a file, a `datasets` folder, a hub id or `text-to-sql` (unseen tables).

    Without `data`, the loss on the run's own validation records is measured. Without
    `metrics`, loss, perplexity and, if there are answers, the metric that fits the records' shape
    are. The loss counts what the run's own loss counted (data.train_on, max_length, too_long). What learned
    classes or pairs of answers is measured on such records, by its own loss and accuracy. `edits`:
    how interventions act; their subspaces win over those that the records choose.
    Raises `ConfigError` for an unknown metric, `DataError` for records that lack what it needs.
    """
    objective = objective_of(trained.config and trained.config.objective, trained.attached)
    judged = [known_metric(metric) for metric in metrics if metric not in objective.metrics]
    if data is None:
        _refuse_choices(judged, max_records, format != "auto", columns, split, max_length)
        return _on_own_validation(trained, objective, metrics or objective.metrics, micro_batch_size, edits)
    rows = _rows(data, split, max_records)
    if objective.records is not None and not _to_be_answered(trained, judged, rows, format, columns):
        _refuse_judged(judged, objective)
        encoded = _judged_records(trained, objective, data, rows, columns, max_length)
        values = _losses(trained, objective, encoded, metrics or objective.metrics, micro_batch_size, edits)
        return Evaluation(trained.name, data, len(rows), values, facts=encoded.facts)
    objective = NextToken()
    name, examples = _examples(data, rows, format, columns)
    records = [{**row.values, **example.fields} for row, example in zip(rows, examples, strict=True)]
    gold = [example.answer for example in examples]
    if not metrics:
        judged = [default_metric(records)] if any(gold) else []
    judges = {metric: judges_for(metric, records, gold, source=data) for metric in judged}
    template = _template(trained, name)
    rules = encoding_rules(trained, max_length, columns)
    values, facts = dict[str, float](), None
    if not metrics or set(metrics) & set(objective.metrics):
        encoded = encode_examples(examples, template, rules, source=data)
        values = _losses(trained, objective, encoded, metrics or objective.metrics, micro_batch_size, edits)
        facts = encoded.facts
    answers = list[str]()
    if judges:
        prompts = [template.prompt(example) for example in examples]
        own = [_edits_for(example, edits, rules.subspaces) for example in examples]
        answers = _answers(trained, template, prompts, sampling, own, batch_size, on_progress)
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


def _to_be_answered(
    trained: Trained,
    judged: Sequence[str],
    rows: Sequence[Row],
    format: str,
    columns: Mapping[str, str] | None,
) -> bool:
    """Whether a model that learned from pairs of answers is asked for answers, as it has no head."""
    pair = all(column_of(field, columns or {}, rows[0].values) for field in ("chosen", "rejected"))
    asked = bool(judged) or format not in ("auto", "preference") or (format == "auto" and not pair)
    return asked and head_of(trained.attached) is None


def _refuse_judged(judged: Sequence[str], objective: Objective) -> None:
    if judged:
        raise ConfigError(
            f"metrics: {', '.join(judged)} judge answers, but {objective.records} records are measured by "
            f"{', '.join(objective.metrics)}; leave it out"
        )


def _judged_records(
    trained: Trained,
    objective: Objective,
    data: str,
    rows: Sequence[Row],
    columns: Mapping[str, str] | None,
    max_length: int | None,
) -> EncodedRecords:
    """Texts with a class or pairs of answers, encoded as in training."""
    head, shape = head_of(trained.attached), str(objective.records)
    try:
        name, examples = read_examples(rows, shape, columns)
        rules = encoding_rules(trained, max_length, columns)
        rules = replace(rules, train_on="label" if shape == "classification" else "answer")
        labels = head.labels if head is not None else None
        template = _template(trained, rendered_as(name))
        return encode_examples(examples, template, rules, source=data, format=name, labels=labels)
    except DataError as error:
        raise DataError(f"{data}: {error}") from error


def _on_own_validation(
    trained: Trained,
    objective: Objective,
    wanted: Sequence[str],
    micro_batch_size: int,
    edits: EditSettings,
) -> Evaluation:
    path = trained.run.records / "validation.safetensors" if trained.run else None
    if path is None or not path.exists():
        raise ConfigError(f"{trained.name} has no validation records of its own; name records with --data")
    records = EncodedRecords.load(path)
    values = _losses(trained, objective, records, wanted, micro_batch_size, edits)
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


def encoding_rules(
    trained: Trained, max_length: int | None = None, columns: Mapping[str, str] | None = None
) -> EncodingRules:
    """What the run's own loss counted, if there is a run, and what its interventions edit."""
    data = trained.config.data if trained.config else None
    rules = (
        EncodingRules(data.max_length, data.too_long, data.train_on) if data else EncodingRules(_MAX_LENGTH)
    )
    markers = trained.attached.markers
    rules = replace(
        rules, markers=Markers(*markers) if markers else None, subspaces=_mask_of(trained, columns)
    )
    return rules if max_length is None else replace(rules, max_length=max_length)


def _mask_of(trained: Trained, columns: Mapping[str, str] | None) -> MaskOf | None:
    """What the field `subspaces` of a record means, if it counted in training or is mapped here."""
    counted = trained.config is not None and chosen_subspaces(trained.config) is not None
    counted = (counted and trained.attached.edits_states) or trained.attached.names_subspaces
    if not counted and "subspaces" not in (columns or {}):
        return None
    return lambda choice: trained.attached.subspace_mask(choice).tolist()


def _edits_for(example: Example, edits: EditSettings, mask_of: MaskOf | None) -> EditSettings:
    """Those that are asked for, with the subspaces of the record if none are."""
    mask = active_dimensions(example, mask_of)
    if mask is None or edits.subspaces is not None:
        return edits
    return replace(edits, subspaces=tuple(index for index, acts in enumerate(mask) if acts))


def _answers(
    trained: Trained,
    template: Template,
    prompts: Sequence[str],
    sampling: Sampling | None,
    edits: Sequence[EditSettings],
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
        edits=edits,
        batch_size=batch_size,
        on_progress=on_progress,
    )


def _losses(
    trained: Trained,
    objective: Objective,
    records: EncodedRecords,
    wanted: Sequence[str],
    micro_batch_size: int,
    edits: EditSettings,
) -> dict[str, float]:
    asked = edits.of(trained.attached)
    if asked.subspaces is not None:
        records = replace(records, subspaces=np.tile(asked.subspaces.numpy(), (len(records), 1)))
    options = {"strength": asked.strength, "generation": asked.generation}
    means = mean_loss(
        trained.attached,
        objective,
        records,
        device=trained.model.device,
        micro_batch_size=micro_batch_size,
        pad_id=0,
        precision=trained.precision,
        edit_options={name: value for name, value in options.items() if value is not None},
    )
    values = {"loss": means.loss, **means.measures}
    return {name: value for name, value in values.items() if name in wanted}
