"""From the `data` section to encoded records: read, render, tokenise, cache, split, report."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from leantune.config.schema import DataSection
from leantune.data.cache import cache_key, cached_records
from leantune.data.encode import EncodingRules, encode_examples, random_records, with_facts
from leantune.data.formats import read_examples
from leantune.data.records import DataFacts, EncodedRecords
from leantune.data.sources import Source, open_source, rows_source
from leantune.data.split import split_by_share
from leantune.data.templates import Template, make_template
from leantune.data.text_to_sql import generate
from leantune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DUMMY = "dummy"
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
    data: DataSection, tokenizer: PreTrainedTokenizerBase, seed: int, *, cache_folder: Path | None = None
) -> PreparedData:
    """Read and encode the training and validation records.

    `seed` decides about generated records and the validation draw. Raises `DataError` if a record
    cannot be read, a setting cannot be obeyed, or no record is left.
    """
    if data.train == DUMMY:
        _refuse_split(data)
        template = make_template(data.template, DUMMY, tokenizer, system=data.system)
        train, report = _dummy(data, tokenizer, seed), list[str]()
    else:
        source = _train_source(data, seed)
        train, report = _encoded(source, _train_format(data), data, tokenizer, "train", cache_folder)
        template = make_template(data.template, train.facts.format, tokenizer, system=data.system)
    report = [describe_source(train.facts, detected=data.format == "auto"), *report]
    validation = None
    if data.validation is not None:
        source = _open(data, "validation")
        validation, more = _encoded(source, template.format, data, tokenizer, "validation", cache_folder)
        report += [describe_source(validation.facts), *more]
    elif data.validation_share:
        train, validation = split_by_share(train, data.validation_share, seed)
    report.append(describe_part("train", train))
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
    share = 100 * facts.supervised_tokens / max(facts.total_tokens, 1)
    return (
        f"{name}: {len(records)} records, {facts.total_tokens:,} tokens, {facts.supervised_tokens:,} of them "
        f"with loss ({share:.0f} %), longest {facts.longest} tokens"
    )


def _train_source(data: DataSection, seed: int) -> Source:
    if data.train != TEXT_TO_SQL:
        return _open(data, "train")
    _refuse_split(data)
    if data.format not in ("auto", "sql"):
        raise DataError(f"data.format: {data.format}: {TEXT_TO_SQL} records have the format sql")
    return rows_source(TEXT_TO_SQL, list(generate(data.generated_records, seed, "train")))


def _train_format(data: DataSection) -> str:
    return "sql" if data.train == TEXT_TO_SQL else data.format


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


def _encoded(
    source: Source,
    format: str,
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    part: Literal["train", "validation"],
    cache_folder: Path | None,
) -> tuple[EncodedRecords, list[str]]:
    """The records of one source, from the cache if they are there; and what to report about that."""
    max_records = data.max_records if part == "train" else None

    def build() -> EncodedRecords:
        rows = itertools.islice(source.rows(), max_records)
        try:
            name, examples = read_examples(rows, format, data.columns)
        except DataError as error:
            raise DataError(f"data.{part}: {source.name}: {error}") from error
        template = make_template(data.template, name, tokenizer, system=data.system)
        rules = EncodingRules(data.max_length, data.too_long, data.train_on)
        return encode_examples(examples, template, rules, source=source.name)

    fingerprint = source.fingerprint() if data.cache else None
    if fingerprint is None:
        return build(), []
    key = cache_key(fingerprint, _settings(data, format, max_records), tokenizer)
    records, line = cached_records(key, build, cache_folder)
    return with_facts(records, source=source.name), [line]


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
        "max_length": data.max_length,
        "too_long": data.too_long,
        "max_records": max_records,
    }


def _dummy(data: DataSection, tokenizer: PreTrainedTokenizerBase, seed: int) -> EncodedRecords:
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    token_ids = [i for i in sorted(tokenizer.get_vocab().values()) if i not in special]
    num_records = min(data.generated_records, data.max_records or data.generated_records)
    return random_records(num_records, data.max_length, token_ids, seed)
