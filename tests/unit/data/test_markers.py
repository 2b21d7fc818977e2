"""Marked spans: exact to the token, the same in training and at generation, whatever the template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from leantune.config.schema import DataSection
from leantune.data.batches import collate
from leantune.data.encode import EncodingRules, encode_examples
from leantune.data.formats import to_example
from leantune.data.markers import Markers
from leantune.data.prepare import prepare_data
from leantune.data.readers import Row
from leantune.data.records import EncodedRecords, Record
from leantune.data.split import take
from leantune.data.templates import Segment, Template, make_template
from leantune.data.tokens import SegmentEncoder
from leantune.errors import DataError
from leantune.generate.prompts import encode_prompts, left_pad
from tests.fixtures import LLAMA2, SAMPLES, tiny_llama, tiny_tokenizer

MARKERS = Markers("[[", "]]")
PROMPT = "the old [[man and the]] woman: [[x]]."
SPANS = ["man and the", "x"]
PLAIN_CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
JINJA = "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}"


def _spaced() -> PreTrainedTokenizerFast:
    """Puts a space before every text, as SentencePiece tokenizers do."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    letters = sorted({letter for text in SAMPLES for letter in text} | set("▁\n[]x"))
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<unk>"],
        initial_alphabet=letters,
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    fast.chat_template = PLAIN_CHAT
    return fast


TOKENIZERS = {
    "bytes": tiny_tokenizer,
    "bos": lambda: tiny_tokenizer(eos="</s>", bos="<s>", adds_bos=True),
    "llama2": lambda: tiny_tokenizer(eos="</s>", bos="<s>", adds_bos=True, chat_template=LLAMA2),
    "spaced": _spaced,
}


def _encode(
    template: Template, prompts: Sequence[str], answer: str = " yes [[no]]", **rules: Any
) -> EncodedRecords:
    rows = [Row({"prompt": p, "completion": answer}, f"a.jsonl:{i}", i - 1) for i, p in enumerate(prompts, 1)]
    examples = [to_example(row, "prompt_completion") for row in rows]
    return encode_examples(
        examples, template, EncodingRules(**{"max_length": 500, "markers": MARKERS, **rules}), source="a"
    )


def _spans(tokenizer: Any, tokens: Sequence[int], marked: Sequence[bool]) -> list[str]:
    """The decoded texts of the runs of marked tokens."""
    runs, inside = list[list[int]](), False
    for token, flag in zip(tokens, marked, strict=True):
        if flag and not inside:
            runs.append([])
        if flag:
            runs[-1].append(token)
        inside = flag
    return [str(tokenizer.decode(run)) for run in runs]


def _of(record: Record) -> tuple[list[int], list[bool]]:
    assert record.marked is not None
    return record.tokens.tolist(), record.marked.tolist()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("spec", ["plain", "chat", "alpaca", "jinja"])
def test_marks_are_those_of_the_span_and_the_same_at_generation(name: str, spec: str, tmp_path: Path) -> None:
    """A token over the edge of a span was edited in training alone, or at generation alone."""
    tokenizer = TOKENIZERS[name]()
    file = tmp_path / "a.jinja"
    file.write_text(JINJA)
    template = make_template(str(file) if spec == "jinja" else spec, "prompt_completion", tokenizer)
    record = _encode(template, [PROMPT])[0]
    ids, marked = _of(record)
    assert _spans(tokenizer, ids, marked) == SPANS
    assert "".join(str(tokenizer.decode(ids[: record.prompt_length]))).count("[[") == 0
    rendered = template.user_prompt(PROMPT)
    prompt = SegmentEncoder(tokenizer).encode_prompts([rendered], MARKERS)[0]
    assert prompt.ids == ids[: record.prompt_length]
    assert prompt.marked == marked[: record.prompt_length]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_prompt_that_begins_with_a_span_keeps_its_bos_unmarked(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    encoder = SegmentEncoder(tokenizer)
    prompt = encoder.encode_prompts(["[[the man]] said"], MARKERS)[0]
    size = len(encoder.prefix)
    assert prompt.ids[:size] == encoder.prefix
    assert not any(prompt.marked[:size])
    assert _spans(tokenizer, prompt.ids, prompt.marked) == ["the man"]


def test_the_naive_way_would_differ() -> None:
    """The cases above are real ones: without the span as a segment of its own, tokens straddle its edges."""
    tokenizer = tiny_tokenizer()
    plain = SegmentEncoder(tokenizer).encode_prompts([PROMPT.replace("[[", "").replace("]]", "")])[0]
    marked = SegmentEncoder(tokenizer).encode_prompts([PROMPT], MARKERS)[0]
    assert plain.ids != marked.ids
    assert tokenizer.decode(plain.ids) == tokenizer.decode(marked.ids)


def test_markers_in_answers_and_without_the_setting_are_text() -> None:
    tokenizer = tiny_tokenizer()
    template = make_template("plain", "prompt_completion", tokenizer)
    ids, marked = _of(_encode(template, [PROMPT])[0])
    assert str(tokenizer.decode(ids)).endswith("yes [[no]]<|im_end|>")
    unmarked = _encode(template, [PROMPT], markers=None)
    assert unmarked.marked is None
    assert str(tokenizer.decode(unmarked[0].tokens)).startswith(PROMPT)
    assert sum(marked) > 0


def test_a_prompt_without_markers_has_no_marks_and_its_usual_tokens() -> None:
    template = make_template("plain", "prompt_completion", tiny_tokenizer())
    with_setting, without = (_encode(template, ["the man"], markers=m) for m in (MARKERS, None))
    assert with_setting.tokens.tolist() == without.tokens.tolist()
    assert with_setting.marked is not None
    assert not with_setting.marked.any()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a [[b [[c]]", r"'\[\[' stands after 'b ', inside a marked span; spans cannot be nested"),
        ("a b]] c", r"'\]\]' stands after 'a b', but closes no span"),
        ("a [[b]] ]]", r"'\]\]' stands after ' ', but closes no span"),
        ("a [[b", r"'\[\[' before 'b' is never closed; put '\]\]' after the span"),
    ],
)
def test_markers_without_a_partner_name_file_and_line(prompt: str, expected: str) -> None:
    """Such a record was trained with the wrong tokens edited, or with markers in its text."""
    tokenizer = tiny_tokenizer()
    template = make_template("plain", "prompt_completion", tokenizer)
    with pytest.raises(DataError, match=r"^a\.jsonl:2: the marker " + expected):
        _encode(template, ["fine", prompt])
    with pytest.raises(DataError, match=r"^prompt 2: the marker " + expected):
        encode_prompts(tiny_llama(num_layers=1), tokenizer, ["fine", prompt], 1, MARKERS)


@pytest.mark.parametrize("pair", [("<", "</"), ("**", "*"), ("(", ")"), (".*", "$"), ("<b>", "</b>")])
def test_markers_may_contain_each_other_and_are_no_patterns(pair: tuple[str, str]) -> None:
    opening, closing = pair
    pieces = Markers(*pair).split([Segment(f"a {opening}b{closing} c", eos=True)], "a:1")
    assert pieces == [Segment("a "), Segment("b", marked=True), Segment(" c", eos=True)]


def test_empty_spans_and_prompts_leave_nothing_behind() -> None:
    assert MARKERS.split([Segment("a[[]]b")], "a:1") == [Segment("a"), Segment("b")]
    assert MARKERS.split([Segment("[[]]")], "a:1") == [Segment("")]


def test_marks_follow_their_records_through_files_splits_truncation_and_batches(tmp_path: Path) -> None:
    """Marks of another record, or shifted by its length, edited tokens that nobody had marked."""
    tokenizer = tiny_tokenizer()
    template = make_template("plain", "prompt_completion", tokenizer)
    records = _encode(template, ["[[the]] man", "no marks here", PROMPT, "a" * 30 + "[[x]]"], max_length=33)
    records.save(tmp_path / "a.safetensors")
    again = EncodedRecords.load(tmp_path / "a.safetensors")
    part = take(again, np.array([2, 0]))
    assert [_of(part[i]) for i in range(2)] == [_of(records[i]) for i in (2, 0)]
    assert sum(_of(records[3])[1]) == 1
    batch = collate(again, [0, 2, 1], pad_id=4)
    assert batch.marked is not None
    for row, index in enumerate([0, 2, 1]):
        ids, marked = _of(records[index])
        padding = batch.input_ids.shape[1] - len(ids)
        assert batch.marked[row].tolist() == [*marked, *[False] * padding]
    assert torch.equal(batch.edit_options["marked"], batch.marked)
    assert batch.edit_options["ends"].tolist() == [len(_of(records[i])[0]) for i in (0, 2, 1)]


def test_files_without_marks_are_read_as_ever(tmp_path: Path) -> None:
    """Runs and caches of earlier versions could not be read."""
    template = make_template("plain", "prompt_completion", tiny_tokenizer())
    records = _encode(template, ["the man"], markers=None)
    records.save(tmp_path / "a.safetensors")
    again = EncodedRecords.load(tmp_path / "a.safetensors")
    assert again.marked is None
    assert again.subspaces is None
    assert collate(again, [0], pad_id=4).edit_options.keys() == {"ends"}


def test_left_padding_moves_marks_with_their_tokens() -> None:
    encoded = SegmentEncoder(tiny_tokenizer()).encode_prompts(["[[a]]", PROMPT, "no marks"], MARKERS)
    batch = left_pad([e.ids for e in encoded], 4, torch.device("cpu"), [e.marked for e in encoded])
    for row, prompt in enumerate(encoded):
        start = int(batch.starts[row])
        assert batch.tokens[row, start:].tolist() == prompt.ids
        assert batch.marked[row].tolist() == [*[False] * start, *prompt.marked]


def test_markers_are_part_of_the_cache_key_and_of_the_report(tmp_path: Path) -> None:
    """A run with markers was given the records that a run without them had left in the cache."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "[[a]] b", "completion": "c"}\n{"prompt": "d", "completion": "e"}\n')
    data = DataSection(train=str(file), template="plain")
    first, second, third = (
        prepare_data(replaced, tiny_tokenizer(), 0, cache_folder=tmp_path / "cache")
        for replaced in (
            data,
            data.model_copy(update={"markers": ("[[", "]]")}),
            data.model_copy(update={"markers": ("[[", "]]")}),
        )
    )
    assert first.train.marked is None
    assert second.train.marked is not None
    assert third.train.marked is not None
    assert second.train.marked.tolist() == third.train.marked.tolist()
    assert "1 records have marked tokens (1 in all)" in "\n".join(second.report)
    assert "from the cache" in "\n".join(third.report)
    assert replace(second.train.facts, source="") == replace(third.train.facts, source="")
