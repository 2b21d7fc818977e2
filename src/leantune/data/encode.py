"""Examples to `EncodedRecords`: tokens, supervised flags, truncation, and a count of what was dropped."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from leantune.config.subspaces import Choice, read_choice
from leantune.data.examples import Example
from leantune.data.judged import classes_of
from leantune.data.markers import Markers
from leantune.data.records import DataFacts, EncodedRecords, IntArray
from leantune.data.templates import Segment, Template
from leantune.data.tokens import Encoded, SegmentEncoder
from leantune.errors import DataError, LeantuneError

CHUNK = 1000  # records tokenised in one call
PROMPT_FILLS = "prompt fills max_length"
TOO_LONG = "longer than max_length"
MaskOf = Callable[[Choice], Sequence[bool]]


@dataclass(frozen=True)
class EncodingRules:
    """What decides about length, loss and edits; the names are those of the `data` section.

    train_on `label` is for texts with a class: no token is learned, and none need be.
    subspaces: from a choice of names and numbers to the dimensions that it means, or to an error; None:
    what records say about that does not count.
    """

    max_length: int
    too_long: Literal["truncate", "drop"] = "truncate"
    train_on: Literal["answer", "all", "label"] = "answer"
    markers: Markers | None = None
    subspaces: MaskOf | None = None


@dataclass
class _Columns:
    """The growing flat arrays of `EncodedRecords`."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    supervised: bytearray = field(default_factory=bytearray)
    offsets: array[int] = field(default_factory=lambda: array("q", [0]))
    prompt_lengths: array[int] = field(default_factory=lambda: array("q"))
    sample_ids: array[int] = field(default_factory=lambda: array("q"))
    marked: bytearray = field(default_factory=bytearray)
    subspaces: list[Sequence[bool] | None] = field(default_factory=list[Sequence[bool] | None])
    labels: list[str] = field(default_factory=list[str])

    def append(
        self, sequences: Iterable[Encoded], example: Example, subspaces: Sequence[bool] | None
    ) -> None:
        for encoded in sequences:
            self.tokens.extend(encoded.ids)
            self.supervised.extend(encoded.supervised)
            self.marked.extend(encoded.marked)
            self.offsets.append(len(self.tokens))
            self.prompt_lengths.append(encoded.prompt_length)
        self.sample_ids.append(example.index)
        self.subspaces.append(subspaces)
        if example.label is not None:
            self.labels.append(example.label)


def encode_examples(
    examples: Iterable[Example],
    template: Template,
    rules: EncodingRules,
    *,
    source: str,
    format: str | None = None,
    labels: Sequence[str] | None = None,
) -> EncodedRecords:
    """Tokenise examples. Raises `DataError`, naming the counts, if no record can be trained on.

    `prompt_lengths` are the tokens before the first answer, whatever `train_on` is; 0 for `text`. `format`:
    how the records are shaped, if not as they are rendered. `labels`: the classes that may occur (None:
    those of the examples, sorted).
    """
    encoder = SegmentEncoder(template.tokenizer)
    columns, dropped = _Columns(), Counter[str]()
    num_records = num_truncated = 0
    for chunk in _chunks(examples):
        num_records += len(chunk)
        dropped.update(example.drop_reason for example in chunk if example.drop_reason)
        kept = [example for example in chunk if not example.drop_reason]
        for example, sequences in _encode_chunk(kept, template, encoder, rules):
            reason = next(filter(None, (_drop_reason(encoded, rules) for encoded in sequences)), None)
            if reason:
                dropped[reason] += 1
                continue
            _check_label(example, labels)
            num_truncated += any(len(encoded.ids) > rules.max_length for encoded in sequences)
            cut = [encoded.cut(rules.max_length) for encoded in sequences]
            columns.append(cut, example, active_dimensions(example, rules.subspaces))
    facts = DataFacts(
        source,
        format or template.format,
        template.name,
        num_records,
        len(columns.sample_ids),
        num_truncated,
        dict(dropped),
        labels=list(labels or classes_of(columns.labels)),
    )
    return _finish(columns, facts, rules)


def _encode_chunk(
    examples: Sequence[Example], template: Template, encoder: SegmentEncoder, rules: EncodingRules
) -> Iterator[tuple[Example, list[Encoded]]]:
    """Each example with its sequences: one, or the chosen and the rejected answer."""
    sequences = [example.sequences() for example in examples]
    rendered = [
        segments if len(several) == 1 else _last_answer_only(segments)
        for several in sequences
        for segments in (_render(template, one, rules.markers) for one in several)
    ]
    encoded = iter(encoder.encode(rendered))
    for example, several in zip(examples, sequences, strict=True):
        tokens = [next(encoded) for _ in several]
        if rules.train_on == "all":
            tokens = [one._replace(supervised=[False] + [True] * (len(one.ids) - 1)) for one in tokens]
        yield example, tokens


def _check_label(example: Example, labels: Sequence[str] | None) -> None:
    if labels is not None and example.label is not None and example.label not in labels:
        raise DataError(
            f"{example.where}: the label {example.label!r} is none of the classes {', '.join(labels)}; "
            "correct it, or name all classes with objective.labels"
        )


def _render(template: Template, example: Example, markers: Markers | None) -> list[Segment]:
    segments = template.segments(example)
    return segments if markers is None else markers.split(segments, example.where)


def _last_answer_only(segments: Sequence[Segment]) -> list[Segment]:
    """Of two answers to one conversation the earlier ones are the prompt."""
    last = max((i for i, segment in enumerate(segments) if segment.supervised), default=-1)
    return [replace(segment, supervised=i == last) for i, segment in enumerate(segments)]


def active_dimensions(example: Example, mask: MaskOf | None) -> Sequence[bool] | None:
    """The dimensions that a record chooses, bool [rank]; None if it chooses none, which means all.

    Raises `DataError` naming file and line for a choice that there is not.
    """
    if mask is None or example.subspaces in (None, ""):
        return None
    try:
        return mask(read_choice(example.subspaces))
    except (ValueError, LeantuneError) as error:
        raise DataError(f"{example.where}: subspaces: {error}") from error


def _chunks(examples: Iterable[Example]) -> Iterator[list[Example]]:
    iterator = iter(examples)
    while chunk := list(itertools.islice(iterator, CHUNK)):
        yield chunk


def _drop_reason(encoded: Encoded, rules: EncodingRules) -> str | None:
    too_long = len(encoded.ids) > rules.max_length
    if too_long and rules.too_long == "drop":
        return TOO_LONG
    if rules.train_on != "label" and not any(encoded.supervised[: rules.max_length]):
        return PROMPT_FILLS if too_long else "nothing to learn"
    return None


def _subspaces(chosen: Sequence[Sequence[bool] | None]) -> npt.NDArray[np.bool_] | None:
    """Bool [n, rank], all dimensions where a record chooses none; None if no record chooses."""
    rank = next((len(mask) for mask in chosen if mask is not None), None)
    if rank is None:
        return None
    return np.array([[True] * rank if mask is None else mask for mask in chosen], dtype=np.bool_)


def _targets(labels: Sequence[str], classes: Sequence[str]) -> IntArray | None:
    if not labels:
        return None
    numbers = {label: number for number, label in enumerate(classes)}
    return np.array([numbers[label] for label in labels], dtype=np.int64)


def _finish(columns: _Columns, facts: DataFacts, rules: EncodingRules) -> EncodedRecords:
    if not columns.sample_ids:
        counts = ", ".join(f"{count} × {reason}" for reason, count in sorted(facts.dropped.items()))
        raise DataError(
            f"{facts.source}: none of the {facts.num_records} records can be trained on "
            f"({counts or 'the source is empty'}); data.max_length is {rules.max_length} tokens"
        )
    return with_facts(
        EncodedRecords(
            tokens=np.array(columns.tokens, dtype=np.int32),
            supervised=np.frombuffer(bytes(columns.supervised), dtype=np.bool_),
            offsets=np.array(columns.offsets, dtype=np.int64),
            prompt_lengths=np.array(columns.prompt_lengths, dtype=np.int64),
            sample_ids=np.array(columns.sample_ids, dtype=np.int64),
            facts=facts,
            marked=np.frombuffer(bytes(columns.marked), dtype=np.bool_) if rules.markers else None,
            subspaces=_subspaces(columns.subspaces),
            targets=_targets(columns.labels, facts.labels),
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
        longest=int(records.sequence_lengths.max(initial=0)),
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
