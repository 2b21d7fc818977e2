"""Examples to `EncodedRecords`: tokens, supervised flags, truncation, and a count of what was dropped."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from leantune.data.examples import Example
from leantune.data.records import DataFacts, EncodedRecords
from leantune.data.templates import Template
from leantune.data.tokens import SegmentEncoder
from leantune.errors import DataError

CHUNK = 1000  # records tokenised in one call
PROMPT_FILLS = "prompt fills max_length"
TOO_LONG = "longer than max_length"


@dataclass(frozen=True)
class EncodingRules:
    """What decides about length and loss; the names are those of the `data` section."""

    max_length: int
    too_long: Literal["truncate", "drop"] = "truncate"
    train_on: Literal["answer", "all"] = "answer"


@dataclass
class _Columns:
    """The growing flat arrays of `EncodedRecords`."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    supervised: bytearray = field(default_factory=bytearray)
    offsets: array[int] = field(default_factory=lambda: array("q", [0]))
    prompt_lengths: array[int] = field(default_factory=lambda: array("q"))
    sample_ids: array[int] = field(default_factory=lambda: array("q"))

    def append(self, ids: list[int], supervised: list[bool], prompt_length: int, sample_id: int) -> None:
        self.tokens.extend(ids)
        self.supervised.extend(supervised)
        self.offsets.append(len(self.tokens))
        self.prompt_lengths.append(prompt_length)
        self.sample_ids.append(sample_id)


def encode_examples(
    examples: Iterable[Example], template: Template, rules: EncodingRules, *, source: str
) -> EncodedRecords:
    """Tokenise examples. Raises `DataError`, naming the counts, if no record can be trained on.

    `prompt_lengths` are the tokens before the first answer, whatever `train_on` is; 0 for `text`.
    """
    encoder = SegmentEncoder(template.tokenizer)
    columns, dropped = _Columns(), Counter[str]()
    num_records = num_truncated = 0
    for chunk in _chunks(examples):
        num_records += len(chunk)
        dropped.update(example.drop_reason for example in chunk if example.drop_reason)
        kept = [example for example in chunk if not example.drop_reason]
        rendered = [template.segments(example) for example in kept]
        for example, (ids, supervised, prompt_length) in zip(kept, encoder.encode(rendered), strict=True):
            if rules.train_on == "all":
                supervised = [False] + [True] * (len(ids) - 1)
            reason = _drop_reason(ids, supervised, rules)
            if reason:
                dropped[reason] += 1
                continue
            num_truncated += len(ids) > rules.max_length
            ids, supervised = ids[: rules.max_length], supervised[: rules.max_length]
            columns.append(ids, supervised, min(prompt_length, len(ids)), example.index)
    facts = DataFacts(
        source,
        template.format,
        template.name,
        num_records,
        len(columns.sample_ids),
        num_truncated,
        dict(dropped),
    )
    return _finish(columns, facts, rules.max_length)


def _chunks(examples: Iterable[Example]) -> Iterator[list[Example]]:
    iterator = iter(examples)
    while chunk := list(itertools.islice(iterator, CHUNK)):
        yield chunk


def _drop_reason(ids: list[int], supervised: list[bool], rules: EncodingRules) -> str | None:
    if len(ids) > rules.max_length and rules.too_long == "drop":
        return TOO_LONG
    if not any(supervised[: rules.max_length]):
        return PROMPT_FILLS if len(ids) > rules.max_length else "nothing to learn"
    return None


def _finish(columns: _Columns, facts: DataFacts, max_length: int) -> EncodedRecords:
    if not columns.sample_ids:
        counts = ", ".join(f"{count} × {reason}" for reason, count in sorted(facts.dropped.items()))
        raise DataError(
            f"{facts.source}: none of the {facts.num_records} records can be trained on "
            f"({counts or 'the source is empty'}); data.max_length is {max_length} tokens"
        )
    return with_facts(
        EncodedRecords(
            tokens=np.array(columns.tokens, dtype=np.int32),
            supervised=np.frombuffer(bytes(columns.supervised), dtype=np.bool_),
            offsets=np.array(columns.offsets, dtype=np.int64),
            prompt_lengths=np.array(columns.prompt_lengths, dtype=np.int64),
            sample_ids=np.array(columns.sample_ids, dtype=np.int64),
            facts=facts,
        )
    )


def with_facts(records: EncodedRecords, source: str | None = None) -> EncodedRecords:
    """The records with their own token counts in the facts, and another source name if given."""
    facts = replace(
        records.facts,
        source=source or records.facts.source,
        num_kept=len(records),
        total_tokens=int(records.offsets[-1]),
        supervised_tokens=int(records.supervised.sum()),
        longest=int(records.lengths.max(initial=0)),
    )
    return replace(records, facts=facts)


def random_records(
    num_records: int, length: int, token_ids: list[int], seed: int, *, source: str = "dummy"
) -> EncodedRecords:
    """Records of `length` random tokens, for measuring: all supervised but the first, a quarter is prompt."""
    generator = np.random.default_rng(seed)
    tokens = generator.choice(np.array(token_ids, dtype=np.int32), size=(num_records, length))
    supervised = np.ones((num_records, length), dtype=np.bool_)
    supervised[:, 0] = False
    facts = DataFacts(source, "dummy", "plain", num_records, num_records, 0)
    return with_facts(
        EncodedRecords(
            tokens=tokens.reshape(-1).astype(np.int32),
            supervised=supervised.reshape(-1),
            offsets=np.arange(num_records + 1, dtype=np.int64) * length,
            prompt_lengths=np.full(num_records, length // 4, dtype=np.int64),
            sample_ids=np.arange(num_records, dtype=np.int64),
            facts=facts,
        )
    )
