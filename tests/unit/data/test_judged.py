"""Texts with a class and pairs of answers: read, encoded, kept, split and batched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from leantune.config.objectives import ClassificationObjective, DpoObjective, RewardObjective
from leantune.config.schema import DataSection
from leantune.data.batches import collate, cut_window, epoch_windows
from leantune.data.examples import Example
from leantune.data.formats import read_examples
from leantune.data.prepare import PreparedData, prepare_data
from leantune.data.readers import Row
from leantune.data.records import EncodedRecords
from leantune.data.show import show_example
from leantune.data.split import take
from leantune.errors import DataError
from tests.fixtures import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TEXTS = [{"text": f"the old man {i}", "label": ("no", "yes")[i % 2]} for i in range(6)]
PAIRS = [{"prompt": f"Question {i}:", "chosen": "twelve " * (1 + i), "rejected": "of them"} for i in range(5)]


def read(*rows: dict[str, Any], format: str, columns: dict[str, str] | None = None) -> list[Example]:
    numbered = [Row(row, f"a.jsonl:{i}", i - 1) for i, row in enumerate(rows, start=1)]
    return list(read_examples(numbered, format, columns)[1])


def prepared(folder: Path, records: list[dict[str, Any]], objective: Any, **data: Any) -> PreparedData:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    section = DataSection(train=str(path), **{"template": "plain", "cache": False, **data})
    return prepare_data(section, TOKENIZER, 0, objective=objective)


def decoded(records: EncodedRecords, sequence: int) -> tuple[str, str]:
    """(prompt, what is learned) of a sequence."""
    one = records.sequence(sequence)
    learned = one.tokens[one.supervised]
    return str(TOKENIZER.decode(one.tokens[: one.prompt_length])), str(TOKENIZER.decode(learned))


def test_a_text_with_a_class_is_a_prompt_without_an_answer(tmp_path: Path) -> None:
    found = prepared(tmp_path, TEXTS, ClassificationObjective())
    train = found.train
    assert train.facts.labels == ["no", "yes"]
    assert train.targets is not None
    assert train.targets.tolist() == [0, 1, 0, 1, 0, 1]
    assert not train.supervised.any()
    assert [decoded(train, i)[0] for i in range(6)] == [record["text"] for record in TEXTS]
    assert (found.format, train.facts.format) == ("prompt_completion", "classification")
    assert "in 2 classes (3 of no, 3 of yes)" in found.report[-1]


def test_two_texts_stand_on_lines_of_their_own() -> None:
    columns = {"text": "sentence1", "text_b": "sentence2"}
    row = {"sentence1": "a b", "sentence2": "c", "label": 1}
    (example,) = read(row, format="classification", columns=columns)
    assert (example.fields["prompt"], example.label) == ("a b\nc", "1")


@pytest.mark.parametrize(
    ("label", "text"), [("yes", "yes"), (3, "3"), (-1, "-1"), (True, "true"), (False, "false")]
)
def test_labels_of_any_plain_kind(label: Any, text: str) -> None:
    assert read({"text": "a", "label": label}, format="classification")[0].label == text


@pytest.mark.parametrize(
    ("value", "message"),
    [(0.5, r"a.jsonl:2: field 'label' is 0.5 \(float\)"), (None, "a.jsonl:2: field 'label' is null")],
)
def test_labels_that_are_none_name_their_line(value: Any, message: str) -> None:
    """Scores such as 0.5 were taken for classes, or a null for the class None."""
    with pytest.raises(DataError, match=message):
        read({"text": "a", "label": "x"}, {"text": "a", "label": value}, format="classification")


def test_numbers_are_in_order_of_their_value(tmp_path: Path) -> None:
    """As texts, 10 comes before 2, and the outputs of the head would be in another order than the classes."""
    records = [{"text": "a", "label": label} for label in (10, 2, 1)]
    train = prepared(tmp_path, records, ClassificationObjective()).train
    assert train.facts.labels == ["1", "2", "10"]
    assert train.targets is not None
    assert train.targets.tolist() == [2, 1, 0]


def test_named_labels_decide_about_the_order_and_what_is_known(tmp_path: Path) -> None:
    found = prepared(tmp_path, TEXTS, ClassificationObjective(labels=("yes", "maybe", "no"))).train
    assert found.facts.labels == ["yes", "maybe", "no"]
    assert found.targets is not None
    assert found.targets.tolist() == [2, 0, 2, 0, 2, 0]
    with pytest.raises(DataError, match=r"records.jsonl:2: the label 'yes' is none of the classes no, maybe"):
        prepared(tmp_path, TEXTS, ClassificationObjective(labels=("no", "maybe")))


def test_a_label_that_only_validation_has_names_file_and_line(tmp_path: Path) -> None:
    """A class that training never saw got a number of its own, or an index out of range at step 1."""
    other = tmp_path / "more.jsonl"
    other.write_text('{"text": "a", "label": "no"}\n{"text": "b", "label": "perhaps"}\n')
    with pytest.raises(DataError, match=r"more.jsonl:2: the label 'perhaps' is none of the classes no, yes"):
        prepared(tmp_path, TEXTS, ClassificationObjective(), validation=str(other))


def test_a_pair_is_two_sequences_with_one_prompt(tmp_path: Path) -> None:
    found = prepared(tmp_path, PAIRS, RewardObjective())
    train = found.train
    assert (len(train), train.sequences_per_record) == (5, 2)
    assert decoded(train, 4) == ("Question 2:", "twelve twelve twelve <|im_end|>")
    assert decoded(train, 5) == ("Question 2:", "of them<|im_end|>")
    assert train.lengths.tolist() == train.sequence_lengths.reshape(5, 2).sum(axis=1).tolist()
    assert "in pairs of answers" in found.report[-1]
    assert "⟦twelve <|im_end|>⟧" in show_example(train, TOKENIZER)


def conversation(*texts: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": text, "extra": "x"} for i, text in enumerate(texts)
    ]


def test_conversations_as_ultrafeedback_has_them(tmp_path: Path) -> None:
    """The answers were read as text, or the earlier turns were learned as well."""
    records = [
        {
            "prompt": "Who?",
            "chosen": conversation("Who?", "A man", "And then?", "twelve"),
            "rejected": conversation("Who?", "A man", "And then?", "name"),
            "messages": conversation("Who?", "A man"),
            "score_chosen": 8.0,
        }
    ]
    found = prepared(tmp_path, records, DpoObjective())
    assert (found.format, found.train.facts.format) == ("chat", "preference_chat")
    prompt, learned = decoded(found.train, 1)
    assert learned == " name<|im_end|>"
    assert prompt.endswith("User: And then?\nAssistant:")
    chat = prepared(tmp_path, records, DpoObjective(), template="chat")
    assert decoded(chat.train, 0)[1] == "twelve<|im_end|>"


def test_a_prompt_stands_before_answers_that_leave_it_out() -> None:
    answers = {"chosen": conversation("", "a")[1:], "rejected": conversation("", "b")[1:]}
    for prompt in ("Who?", conversation("Who?")):
        (example,) = read({"prompt": prompt, **answers}, format="preference")
        assert [m["content"] for m in example.messages] == ["Who?", "a"]
        assert [m["content"] for m in example.rejected or ()] == ["Who?", "b"]


def test_pairs_that_are_none_are_refused_or_counted(tmp_path: Path) -> None:
    one, other = conversation("A?", "a"), conversation("B?", "b")
    with pytest.raises(DataError, match=r"a.jsonl:1: the conversations .* differ before their last turns"):
        read({"chosen": one, "rejected": other}, format="preference")
    with pytest.raises(DataError, match="must end with an assistant turn"):
        read({"chosen": conversation("A?"), "rejected": one}, format="preference")
    same = [
        *PAIRS,
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": ""},
    ]
    dropped = prepared(tmp_path, same, DpoObjective()).train.facts.dropped
    assert dropped == {"chosen and rejected are the same": 1, "empty answer": 1}


def test_a_pair_is_dropped_as_a_whole(tmp_path: Path) -> None:
    """One answer of a pair was dropped for its length, and the next record's answer took its place."""
    long = {"prompt": "Question:", "chosen": "short", "rejected": "twelve " * 40}
    train = prepared(tmp_path, [*PAIRS, long], DpoObjective(), max_length=30, too_long="drop").train
    assert (len(train), len(train.offsets)) == (5, 11)
    assert train.facts.dropped == {"longer than max_length": 1}


def test_judged_records_without_their_objective_say_which_they_need() -> None:
    with pytest.raises(DataError, match=r"preference records, .* set objective: dpo or reward"):
        read(PAIRS[0], format="auto")
    assert read(TEXTS[0], format="auto")[0].format == "text"


def test_pairs_and_classes_survive_saving_splitting_and_batches(tmp_path: Path) -> None:
    """Targets or second answers were left behind where records are cut, chosen or written."""
    for records, objective in ((PAIRS, DpoObjective()), (TEXTS, ClassificationObjective())):
        whole = prepared(tmp_path, records, objective).train
        whole.save(tmp_path / "records.safetensors")
        again = EncodedRecords.load(tmp_path / "records.safetensors")
        chosen = take(again, np.array([3, 1]))
        many = whole.sequences_per_record
        assert chosen.facts.labels == whole.facts.labels
        for new, old in enumerate((3, 1)):
            for k in range(many):
                a, b = chosen.sequence(new * many + k), whole.sequence(old * many + k)
                assert (a.sample_id, a.tokens.tolist()) == (b.sample_id, b.tokens.tolist())
        batch = collate(chosen, [0, 1], pad_id=0)
        assert batch.sample_ids == (3, 1)
        assert len(batch.input_ids) == 2 * many
        last = [row.tokens[-1] for row in map(chosen.sequence, range(2 * many))]
        assert batch.input_ids.flatten()[batch.last_index].tolist() == last
        assert (batch.targets is None) == (whole.targets is None)
        if whole.targets is not None and batch.targets is not None:
            assert batch.targets.tolist() == whole.targets[[3, 1]].tolist()


def test_windows_count_records_and_the_padding_of_both_answers(tmp_path: Path) -> None:
    pairs = prepared(tmp_path, PAIRS, DpoObjective()).train
    windows = epoch_windows(pairs.lengths, 2, 0, 0, True)
    assert sorted(int(i) for window in windows for i in window) == [0, 1, 2, 3, 4]
    window = cut_window(pairs, np.arange(5), 2)
    assert window.num_records == 5
    assert window.supervised_tokens == int(pairs.supervised.sum())
    assert window.total_tokens == len(pairs.tokens)
    assert window.padded_tokens == sum(collate(pairs, chunk, 0).input_ids.numel() for chunk in window.chunks)


def test_files_of_records_from_before_still_load(tmp_path: Path) -> None:
    records = prepared(tmp_path, PAIRS, DpoObjective()).train
    path = tmp_path / "old.safetensors"
    records.save(path)
    facts = {k: v for k, v in vars(records.facts).items() if k != "labels"}
    save_file(load_file(path), path, metadata={"facts": json.dumps(facts)})
    assert EncodedRecords.load(path).facts.labels == []
