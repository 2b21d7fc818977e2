"""From the data section to encoded records and a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leantune.config.schema import DataSection
from leantune.data.prepare import PreparedData, prepare_data
from leantune.errors import DataError
from tests.fixtures import tiny_tokenizer


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "a.jsonl"
    rows = [{"instruction": f"say {i}", "output": str(i) if i else ""} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _prepare(**settings: Any) -> PreparedData:
    return prepare_data(DataSection(cache=False, **settings), tiny_tokenizer(), 0)


def test_the_report_says_what_was_read_and_dropped(file: str) -> None:
    prepared = _prepare(train=file, validation_share=0.34)
    assert prepared.validation is not None
    assert (prepared.format, prepared.template.name) == ("alpaca", "chat")
    report = "\n".join(prepared.report)
    assert f"{file}: format alpaca (detected), template chat" in report
    assert "9 of 10 records kept (0 truncated, 1 dropped: 1 × empty answer)" in report
    assert "train: 6 records" in report
    assert "validation: 3 records" in report


def test_max_records_takes_the_first_training_records_only(file: str) -> None:
    prepared = _prepare(train=file, validation=file, max_records=3)
    assert prepared.train.sample_ids.tolist() == [1, 2]
    assert prepared.validation is not None
    assert len(prepared.validation) == 9


def test_validation_is_read_in_the_format_of_training(file: str, tmp_path: Path) -> None:
    other = tmp_path / "b.jsonl"
    other.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl:1: field 'instruction' is missing"):
        _prepare(train=file, validation=str(other))


def test_errors_name_the_key_and_the_source(file: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^data.train: .*no such file"):
        _prepare(train=str(tmp_path / "b.jsonl"))
    with pytest.raises(DataError, match=r"^data.validation: split 'test'"):
        _prepare(train=file, validation=file, validation_split="test")
    (tmp_path / "c.jsonl").write_text("")
    with pytest.raises(DataError, match=r"c\.jsonl: the source holds no records"):
        _prepare(train=str(tmp_path / "c.jsonl"))


def test_dummy_records_fill_max_length_with_ordinary_tokens() -> None:
    prepared = _prepare(train="dummy", generated_records=8, max_length=16, max_records=6)
    assert prepared.train.lengths.tolist() == [16] * 6
    assert prepared.train.tokens.min() > 5  # the special tokens of the fixture are 0 to 5
    assert prepared.train.tokens.max() < len(tiny_tokenizer())
    assert prepared.format == "dummy"


def test_generated_sql_is_split_and_named(tmp_path: Path) -> None:
    prepared = _prepare(train="text-to-sql", generated_records=10, validation_share=0.2)
    assert prepared.validation is not None
    assert (len(prepared.train), len(prepared.validation)) == (8, 2)
    assert prepared.format == "sql"


def test_special_names_win_over_folders_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dummy").mkdir()
    (tmp_path / "dummy" / "a.jsonl").write_text('{"text": "a"}\n')
    assert _prepare(train="dummy", generated_records=3, max_length=8).format == "dummy"
    assert _prepare(train="./dummy").format == "text"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"train": "text-to-sql", "format": "alpaca"}, "data.format: alpaca"),
        ({"train": "text-to-sql", "split": "test"}, "data.split: text-to-sql has no splits"),
        ({"train": "dummy", "subset": "x"}, "data.subset: dummy has no subsets"),
        ({"train": "dummy", "template": "alpaca"}, "used as they are"),
        ({"train": "dummy", "system": "x"}, "no place for a system message"),
        ({"train": "dummy", "validation": "dummy"}, "can only be data.train"),
    ],
)
def test_settings_that_generated_records_cannot_obey_are_refused(
    settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(DataError, match=expected):
        _prepare(**settings)
