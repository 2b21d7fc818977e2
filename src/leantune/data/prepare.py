"""From the `data` section to encoded records: read, render, tokenise, cache, split, report."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from leantune.config.objective_checks import RECORDS
from leantune.config.objectives import ClassificationObjective, NextTokenObjective, Objective
from leantune.config.schema import DataSection
from leantune.config.subspaces import Subspaces
from leantune.data.cache import cache_key, cached_records
from leantune.data.encode import EncodingRules, encode_examples, random_records, with_facts
from leantune.data.formats import read_examples
from leantune.data.markers import Markers
from leantune.data.records import DataFacts, EncodedRecords
from leantune.data.sources import Source, open_source, rows_source
from leantune.data.split import split_by_share
from leantune.data.templates import Template, make_template
from leantune.data.text_to_sql import generate
from leantune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DUMMY = "dummy"
_NEXT_TOKEN = NextTokenObjective()
TEXT_TO_SQL = "text-to-sql"


@dataclass(frozen=True)
class PreparedData:
    """What training needs to know about its data; `report` are lines for the user."""

    train: EncodedRecords
    validation: EncodedRecords | None
    template: Template
    format: str
    report: list[str]


def prepare_data(
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    objective: Objective = _NEXT_TOKEN,
    subspaces: Subspaces | None = None,
    cache_folder: Path | None = None,
) -> PreparedData:
    """Read and encode the training and validation records.

    `seed` decides about generated records and the validation draw, `objective` about the shape of the
    records; `subspaces` are those that their field of this name chooses from (None: the field means
    nothing). Raises `DataError` if a record cannot be read, a setting cannot be obeyed, or no record is left.
    """
    reader = _Reader(data, tokenizer, subspaces, cache_folder)
    if data.train == DUMMY:
        _refuse_split(data)
        template = make_template(data.template, DUMMY, tokenizer, system=data.system)
        train, report = _dummy(data, tokenizer, seed), list[str]()
    else:
        source, format = _train_source(data, seed), _train_format(data, objective)
        labels = objective.labels if isinstance(objective, ClassificationObjective) else None
        train, report = reader.read(source, format, "train", labels)
        template = make_template(data.template, train.facts.format, tokenizer, system=data.system)
    report = [describe_source(train.facts, detected=data.format == "auto"), *report]
    validation = None
    if data.validation is not None:
        source = _open(data, "validation")
        validation, more = reader.read(source, train.facts.format, "validation", train.facts.labels)
        report += [describe_source(validation.facts), *more]
    elif data.validation_share:
        train, validation = split_by_share(train, data.validation_share, seed)
    report.append(describe_part("train", train))
    if subspaces is not None and train.subspaces is None:
        report.append("no record has anything in its field subspaces, so that all train every dimension")
    if validation is not None:
        report.append(describe_part("validation", validation))
    return PreparedData(train, validation, template, template.format, report)


def describe_source(facts: DataFacts, *, detected: bool = False) -> str:
    """A line about the records of a source: format, template, and what was kept and dropped."""
    reasons = ", ".join(f"{count} × {reason}" for reason, count in sorted(facts.dropped.items()))
    dropped = f"{sum(facts.dropped.values())} dropped" + (f": {reasons}" if reasons else "")
    shape = f"format {facts.format}{' (detected)' if detected else ''}, template {facts.template}"
    return (
        f"{facts.source}: {shape}: "
        f"{facts.num_kept} of {facts.num_records} records kept ({facts.num_truncated} truncated, {dropped})"
    )


def describe_part(name: str, records: EncodedRecords) -> str:
    """A line about the tokens of the training or validation records."""
    facts = records.facts
    what = f"{name}: {len(records)} records, {facts.total_tokens:,} tokens"
    if records.targets is not None:
        counts = np.bincount(records.targets, minlength=len(facts.labels))
        classes = ", ".join(f"{n} of {label}" for label, n in zip(facts.labels, counts, strict=True))
        learned = f" in {len(facts.labels)} classes ({classes})"
    else:
        share = 100 * facts.supervised_tokens / max(facts.total_tokens, 1)
        pairs = " in pairs of answers" if records.sequences_per_record > 1 else ""
        learned = f"{pairs}, {facts.supervised_tokens:,} of them with loss ({share:.0f} %)"
    return f"{what}{learned}, longest {facts.longest} tokens{_describe_edits(records)}"


def _describe_edits(records: EncodedRecords) -> str:
    """What the records say about edits, if they say anything."""
    parts = list[str]()
    if records.marked is not None:
        marked = np.logical_or.reduceat(records.marked, records.offsets[:-1])
        with_marks = np.count_nonzero(marked.reshape(len(records), -1).any(axis=1))
        parts.append(
            f"; {with_marks} records have marked tokens ({np.count_nonzero(records.marked):,} in all)"
        )
    if records.subspaces is not None:
        choosing = np.count_nonzero(~records.subspaces.all(axis=1))
        parts.append(f"; {choosing} records train a part of the {records.subspaces.shape[1]} dimensions")
    return "".join(parts)


def _train_source(data: DataSection, seed: int) -> Source:
    if data.train != TEXT_TO_SQL:
        return _open(data, "train")
    _refuse_split(data)
    if data.format not in ("auto", "sql"):
        raise DataError(f"data.format: {data.format}: {TEXT_TO_SQL} records have the format sql")
    return rows_source(TEXT_TO_SQL, list(generate(data.generated_records, seed, "train")))


def _train_format(data: DataSection, objective: Objective) -> str:
    return "sql" if data.train == TEXT_TO_SQL else RECORDS.get(objective.name, data.format)


def _refuse_split(data: DataSection) -> None:
    """Generated records have neither subsets nor splits."""
    if data.subset is not None or data.split != _default("split"):
        key = "split" if data.subset is None else "subset"
        raise DataError(f"data.{key}: {data.train} has no {key}s; remove the key")


def _default(key: str) -> str:
    return str(DataSection.model_fields[key].default)


def _open(data: DataSection, part: Literal["train", "validation"]) -> Source:
    name = data.train if part == "train" else str(data.validation)
    if part == "validation" and name in (DUMMY, TEXT_TO_SQL):
        raise DataError(
            f"data.validation: {name} can only be data.train; set data.validation_share to hold some "
            "of it out"
        )
    key = "split" if part == "train" else "validation_split"
    # A local validation file beside a training set of the hub has no subset.
    subset = None if part == "validation" and Path(name).expanduser().exists() else data.subset
    try:
        return open_source(name, subset=subset, split=getattr(data, key), default_split=_default(key))
    except DataError as error:
        raise DataError(f"data.{part}: {error}") from error


@dataclass(frozen=True)
class _Reader:
    """What reading the training and the validation records has in common."""

    data: DataSection
    tokenizer: PreTrainedTokenizerBase
    subspaces: Subspaces | None
    cache_folder: Path | None

    def read(
        self, source: Source, format: str, part: Literal["train", "validation"], labels: Sequence[str] | None
    ) -> tuple[EncodedRecords, list[str]]:
        """The records of one source, from the cache if they are there; and what to report about that."""
        data, max_records = self.data, self.data.max_records if part == "train" else None

        def build() -> EncodedRecords:
            rows = itertools.islice(source.rows(), max_records)
            try:
                name, examples = read_examples(rows, format, data.columns)
            except DataError as error:
                raise DataError(f"data.{part}: {source.name}: {error}") from error
            template = make_template(data.template, name, self.tokenizer, system=data.system)
            rules = self._rules(format)
            return encode_examples(
                examples, template, rules, source=source.name, format=name, labels=labels or None
            )

        fingerprint = source.fingerprint() if data.cache else None
        if fingerprint is None:
            return build(), []
        settings = _settings(data, format, max_records) | {
            "subspaces": self.subspaces and asdict(self.subspaces),
            "labels": labels,
        }
        key = cache_key(fingerprint, settings, self.tokenizer)
        records, line = cached_records(key, build, self.cache_folder)
        return with_facts(records, source=source.name), [line]

    def _rules(self, format: str) -> EncodingRules:
        data = self.data
        return EncodingRules(
            data.max_length,
            data.too_long,
            "label" if format == "classification" else data.train_on,
            Markers(*data.markers) if data.markers else None,
            self.subspaces.mask if self.subspaces else None,
        )


def _settings(data: DataSection, format: str, max_records: int | None) -> dict[str, object]:
    """Every setting that decides about the tokens, and the text of a template file."""
    template = Path(data.template).expanduser()
    content = template.read_bytes().hex() if template.is_file() else None
    return {
        "format": format,
        "columns": data.columns,
        "template": data.template,
        "template_content": content,
        "system": data.system,
        "train_on": data.train_on,
        "markers": data.markers,
        "max_length": data.max_length,
        "too_long": data.too_long,
        "max_records": max_records,
    }


def _dummy(data: DataSection, tokenizer: PreTrainedTokenizerBase, seed: int) -> EncodedRecords:
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    token_ids = [i for i in sorted(tokenizer.get_vocab().values()) if i not in special]
    num_records = min(data.generated_records, data.max_records or data.generated_records)
    return random_records(num_records, data.max_length, token_ids, seed)
