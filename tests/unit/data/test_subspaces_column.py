"""The field `subspaces`: which dimensions a record trains, from its names and numbers to the batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leantune.config.schema import DataSection
from leantune.config.subspaces import Subspaces
from leantune.data.batches import collate
from leantune.data.prepare import PreparedData, prepare_data
from leantune.data.records import EncodedRecords
from leantune.data.split import take
from leantune.errors import DataError
from tests.fixtures import tiny_tokenizer

SUBSPACES = Subspaces.read(4, {"formal": "0-1", "sql": (3,)})
ALL = [True] * 4


def _write(path: Path, choices: Sequence[Any], column: str = "subspaces") -> str:
    rows = [{"prompt": f"p{i}", "completion": "c", column: choice} for i, choice in enumerate(choices)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _prepare(file: str, subspaces: Subspaces | None = SUBSPACES, **settings: Any) -> PreparedData:
    data = DataSection(**{"train": file, "template": "plain", "cache": False, **settings})
    return prepare_data(data, tiny_tokenizer(), 0, subspaces=subspaces)


def _masks(records: EncodedRecords) -> list[list[bool]]:
    assert records.subspaces is not None
    return records.subspaces.tolist()


def test_names_numbers_lists_and_texts_become_masks(tmp_path: Path) -> None:
    choices = ["formal", ["sql", "formal"], [2], 0, "sql, 2", None, ["sql", 3]]
    prepared = _prepare(_write(tmp_path / "a.jsonl", choices))
    yes, no = True, False
    assert _masks(prepared.train) == [
        [yes, yes, no, no],
        [yes, yes, no, yes],
        [no, no, yes, no],
        [yes, no, no, no],
        [no, no, yes, yes],
        ALL,
        [no, no, no, yes],
    ]
    assert "6 records train a part of the 4 dimensions" in "\n".join(prepared.report)


def test_csv_cells_hold_lists_with_commas_and_empty_ones_choose_nothing(tmp_path: Path) -> None:
    """A CSV file cannot hold a list, and has no null."""
    file = tmp_path / "a.csv"
    file.write_text('prompt,completion,subspaces\na,b,"formal,2"\na,b,\n')
    assert _masks(_prepare(str(file)).train) == [[True, True, True, False], ALL]


def test_the_column_can_have_another_name(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.jsonl", ["sql"], column="style")
    assert _prepare(file).train.subspaces is None
    mapped = _prepare(file, columns={"subspaces": "style"})
    assert _masks(mapped.train) == [[False, False, False, True]]


def test_records_that_choose_nothing_are_named_in_the_report(tmp_path: Path) -> None:
    """A misspelt column trained every record on every dimension without a word."""
    prepared = _prepare(_write(tmp_path / "a.jsonl", ["formal"], column="subspace"))
    assert prepared.train.subspaces is None
    assert "no record has anything in its field subspaces" in "\n".join(prepared.report)


def test_a_field_that_means_nothing_to_the_method_is_left_alone(tmp_path: Path) -> None:
    prepared = _prepare(_write(tmp_path / "a.jsonl", [{"anything": 1}]), None)
    assert prepared.train.subspaces is None
    assert "subspaces" not in "\n".join(prepared.report)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("forma", "there is no subspace 'forma'; method.subspaces names formal, sql"),
        ([1, 4], "dimension 4 does not exist; the rank is 4: 0 to 3"),
        ([-1], "dimension -1 does not exist"),
        ([], "no subspace is listed"),
        ([True], "True is neither the name of a subspace nor a dimension"),
        ({"formal": 1}, "neither the name of a subspace nor a dimension"),
        ([1.5], "1.5 is neither"),
        (["formal", " "], "' ' is neither"),
    ],
)
def test_choices_that_do_not_exist_name_file_and_line(tmp_path: Path, choice: Any, expected: str) -> None:
    file = _write(tmp_path / "a.jsonl", ["formal", choice])
    with pytest.raises(DataError, match=rf"{file}:2: subspaces: .*{expected}"):
        _prepare(file)


def test_masks_follow_their_records_through_files_splits_and_batches(tmp_path: Path) -> None:
    records = _prepare(_write(tmp_path / "a.jsonl", ["formal", None, "sql"])).train
    records.save(tmp_path / "a.safetensors")
    again = EncodedRecords.load(tmp_path / "a.safetensors")
    masks = _masks(records)
    assert _masks(take(again, np.array([2, 0]))) == [masks[2], masks[0]]
    batch = collate(again, (2, 1), pad_id=4)
    assert batch.edit_options["subspaces"].tolist() == [masks[2], masks[1]]
    split = _prepare(_write(tmp_path / "b.jsonl", ["formal", "sql", None, "2"]), validation_share=0.5)
    assert split.validation is not None
    found = {tuple(m) for part in (split.train, split.validation) for m in _masks(part)}
    assert len(found) == 4


def test_the_cache_tells_what_names_mean(tmp_path: Path) -> None:
    """Names that had got other dimensions trained those of the run before."""
    file = _write(tmp_path / "a.jsonl", ["formal"])
    data = DataSection(train=file, template="plain")
    other = Subspaces.read(4, {"formal": "2-3"})
    masks = [
        _masks(
            prepare_data(
                data, tiny_tokenizer(), 0, subspaces=subspaces, cache_folder=tmp_path / "cache"
            ).train
        )
        for subspaces in (SUBSPACES, other, SUBSPACES)
    ]
    assert masks == [[[True, True, False, False]], [[False, False, True, True]], [[True, True, False, False]]]


def test_every_format_has_the_field(tmp_path: Path) -> None:
    rows: dict[str, dict[str, Any]] = {
        "alpaca": {"instruction": "a", "output": "b"},
        "chat": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "sql": {"question": "a", "context": "create table t (a)", "answer": "select a"},
        "text": {"text": "a"},
        "guanaco": {"text": "### Human: a### Assistant: b"},
    }
    for name, row in rows.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps({**row, "subspaces": "sql"}) + "\n")
        prepared = _prepare(str(file), format="auto")
        assert prepared.format == name
        assert _masks(prepared.train) == [[False, False, False, True]]
