"""The cache: a hit only if nothing that matters changed, and never a crash."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leantune.config.cache import cache_root
from leantune.config.schema import DataSection
from leantune.data.cache import cached_records, tokenizer_identity
from leantune.data.encode import random_records
from leantune.data.prepare import PreparedData, prepare_data
from leantune.data.records import EncodedRecords
from tests.fixtures import CHATML, tiny_tokenizer


def test_cache_root_follows_the_environment() -> None:
    assert cache_root({"LEANTUNE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_root({"LEANTUNE_CACHE": "", "XDG_CACHE_HOME": "/b"}) == Path("/b/leantune")
    assert cache_root({}) == Path.home() / ".cache" / "leantune"


def _builder(calls: list[int]) -> EncodedRecords:
    calls.append(1)
    return random_records(3, 8, [5, 6], 0)


def test_a_broken_file_is_built_again(tmp_path: Path) -> None:
    """A run that was killed while writing made every later run fail."""
    calls: list[int] = []
    cached_records("key", lambda: _builder(calls), tmp_path)
    path = tmp_path / "key.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    records, line = cached_records("key", lambda: _builder(calls), tmp_path)
    assert (len(calls), len(records)) == (2, 3)
    assert "broken" in line
    cached_records("key", lambda: _builder(calls), tmp_path)
    assert len(calls) == 2


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(cached_records, "key", lambda: _builder([]), tmp_path) for _ in range(16)]
        assert all(len(job.result()[0]) == 3 for job in jobs)
    assert [path.name for path in tmp_path.iterdir()] == ["key.safetensors"]
    assert len(EncodedRecords.load(tmp_path / "key.safetensors")) == 3


def test_a_cache_that_cannot_be_written_is_reported_not_fatal(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    records, line = cached_records("key", lambda: _builder([]), blocked / "data")
    assert len(records) == 3
    assert "cannot be written" in line


def _prepare(folder: Path, tokenizer: Any = None, seed: int = 0, **settings: Any) -> PreparedData:
    data = DataSection(**{"train": str(folder / "a.jsonl"), **settings})
    return prepare_data(data, tokenizer or tiny_tokenizer(), seed, cache_folder=folder / "cache")


def _entries(folder: Path) -> int:
    return len(list((folder / "cache").glob("*.safetensors")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    (tmp_path / "t.jinja").write_text("{{ prompt }}{{ answer }}")
    return tmp_path


def test_the_same_input_is_encoded_once(folder: Path) -> None:
    first, second = _prepare(folder), _prepare(folder)
    assert _entries(folder) == 1
    assert any("from the cache" in line for line in second.report)
    assert np.array_equal(first.train.tokens, second.train.tokens)
    assert second.template.name == "chat"
    _prepare(folder, validation_share=0.5, seed=3)
    assert _entries(folder) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"format": "prompt_completion"},
        {"template": "plain"},
        {"system": "Be brief."},
        {"train_on": "all"},
        {"max_length": 64},
        {"too_long": "drop"},
        {"max_records": 2},
        {"columns": {"prompt": "completion"}},
        {"tokenizer": tiny_tokenizer(vocab_size=350)},
        {"tokenizer": tiny_tokenizer(eos="</s>")},
        {"tokenizer": tiny_tokenizer(chat_template=CHATML.replace("<|im_end|>\n", "<|im_end|>"))},
        {"tokenizer": tiny_tokenizer(bos="<s>", adds_bos=True)},
    ],
)
def test_each_thing_that_matters_makes_a_new_entry(folder: Path, change: dict[str, Any]) -> None:
    """A changed setting trained on the tokens of the last run."""
    _prepare(folder)
    _prepare(folder, **change)
    assert _entries(folder) == 2


def test_changed_files_make_new_entries(folder: Path) -> None:
    template = str(folder / "t.jinja")
    before = _prepare(folder, template=template).train.tokens
    (folder / "t.jinja").write_text("Q{{ prompt }}{{ answer }}")
    after = _prepare(folder, template=template).train.tokens
    assert len(after) == len(before) + 4
    (folder / "a.jsonl").write_text('{"prompt": "a", "completion": "c"}\n' * 4)
    _prepare(folder, template=template)
    assert _entries(folder) == 3


def test_a_moved_file_is_a_hit_under_its_new_name(folder: Path) -> None:
    _prepare(folder)
    (folder / "a.jsonl").rename(folder / "b.jsonl")
    moved = _prepare(folder, train=str(folder / "b.jsonl"))
    assert _entries(folder) == 1
    assert moved.train.facts.source == str(folder / "b.jsonl")


def test_the_seed_matters_for_generated_records_only(folder: Path) -> None:
    for seed in (0, 1):
        _prepare(folder, seed=seed)
        _prepare(folder, seed=seed, train="text-to-sql", generated_records=3)
    assert _entries(folder) == 3


def test_cache_false_keeps_nothing(folder: Path) -> None:
    _prepare(folder, cache=False)
    assert _entries(folder) == 0


def test_identity_is_not_changed_by_padded_calls() -> None:
    """A tokenizer that had padded or truncated once looked like another one."""
    tokenizer = tiny_tokenizer()
    before = tokenizer_identity(tokenizer)
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert tokenizer_identity(tokenizer) == before
