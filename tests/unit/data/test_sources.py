"""Finding records: files, folders of files, saved data sets; and refusing what cannot be obeyed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leantune.data.sources import open_source
from leantune.errors import DataError


def _jsonl(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def _texts(name: str | Path, split: str = "train") -> list[str]:
    return [row.values["text"] for row in open_source(str(name), split=split).rows()]


def test_rows_are_numbered_from_zero(tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "a.jsonl", "a", "b")
    assert [row.index for row in open_source(str(file)).rows()] == [0, 1]


def test_a_folder_gives_the_files_of_the_split_only(tmp_path: Path) -> None:
    """Test records were trained on because they lay in the same folder."""
    _jsonl(tmp_path / "train-0.jsonl", "a")
    _jsonl(tmp_path / "train-1.jsonl", "b")
    _jsonl(tmp_path / "test.jsonl", "c")
    _jsonl(tmp_path / "valid" / "x.jsonl", "d")
    assert _texts(tmp_path) == ["a", "b"]
    assert _texts(tmp_path, "test") == ["c"]
    assert _texts(tmp_path, "validation") == ["d"]
    with pytest.raises(DataError, match="no file for the split 'extra'"):
        open_source(str(tmp_path), split="extra")


def test_a_folder_of_files_without_split_names_is_read_whole(tmp_path: Path) -> None:
    _jsonl(tmp_path / "b.jsonl", "b")
    _jsonl(tmp_path / "a.jsonl", "a")
    assert _texts(tmp_path) == ["a", "b"]


def test_saved_datasets_and_their_splits(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_dict({"text": ["a", "b"]})
    data.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(str(tmp_path / "two"))
    assert _texts(tmp_path / "one") == ["a", "b"]
    assert _texts(tmp_path / "two", "test") == ["b"]
    with pytest.raises(DataError, match="no split 'dev'; the folder has train, test"):
        open_source(str(tmp_path / "two"), split="dev")


def test_a_missing_file_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    """A misspelt path was sent to the hub, which answered something unrelated."""
    _jsonl(tmp_path / "records.jsonl", "a")
    with pytest.raises(DataError, match=r"no such file or folder.*did you mean .*records.jsonl"):
        open_source(str(tmp_path / "record.jsonl"))


def test_split_and_subset_of_a_file_are_refused(tmp_path: Path) -> None:
    """The keys were ignored."""
    file = str(_jsonl(tmp_path / "a.jsonl", "a"))
    with pytest.raises(DataError, match="which has no splits"):
        open_source(file, split="test")
    with pytest.raises(DataError, match="only hub data sets have subsets"):
        open_source(file, subset="main")


def test_fingerprint_follows_content_not_name_or_time(tmp_path: Path) -> None:
    first, second = _jsonl(tmp_path / "a.jsonl", "a"), _jsonl(tmp_path / "b.jsonl", "a")
    before = open_source(str(first)).fingerprint()
    assert before == open_source(str(second)).fingerprint()
    _jsonl(first, "b")
    assert before != open_source(str(first)).fingerprint()


def test_fingerprint_of_a_folder_covers_all_its_files(tmp_path: Path) -> None:
    _jsonl(tmp_path / "a.jsonl", "a")
    _jsonl(tmp_path / "b.jsonl", "b")
    before = open_source(str(tmp_path)).fingerprint()
    _jsonl(tmp_path / "b.jsonl", "c")
    assert before != open_source(str(tmp_path)).fingerprint()
