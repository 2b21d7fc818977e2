"""Files of prompts are read whole, or refused with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from leantune.errors import DataError
from leantune.evaluate.prompts import read_prompts


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("p.txt", "\ufeffone\r\n\r\n  two  \n\n", ["one", "two"]),
        ("p.txt", "one\u2028still one\n", ["one\u2028still one"]),
        ("p.jsonl", '"one"\r\n\n{"question": "two\\n"}\n', ["one", "two\n"]),
        ("p.jsonl", '{"instruction": "three", "prompt": null}', ["three"]),
        ("p.jsonl", '{"prompt": "a\u2028b"}\n', ["a\u2028b"]),
        ("p.JSON", '\ufeff["one", {"prompt": "two", "question": "not this"}]', ["one", "two"]),
    ],
)  # fmt: skip
def test_every_format_is_read(tmp_path: Path, name: str, content: str, prompts: list[str]) -> None:
    assert read_prompts(write(tmp_path, name, content)) == prompts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '"one"\n\n{"prompt": }\n', r"p\.jsonl:3: not JSON"),
        ("p.jsonl", '"one"\n{"text": "x"}\n', r"p\.jsonl:2: none of the fields prompt, .*; it has text"),
        ("p.jsonl", '{"prompt": 7}\n', r"p\.jsonl:1: field `prompt`: 7 is not a prompt"),
        ("p.jsonl", '""\n', r"p\.jsonl:1: '' is not a prompt"),
        ("p.json", '[\n"one",\n]', r"p\.json:3: not JSON"),
        ("p.json", '{"prompt": "one"}', r"p\.json: is dict at its top"),
        ("p.json", '["one", []]', r"p\.json: item 2: \[\] is not a prompt"),
        ("p.jsonl", "[" * 100_000, r"p\.jsonl:1: nested too deeply"),
        ("p.txt", "\n \n", r"p\.txt: there are no prompts"),
        ("p.txt", b"\xff\xfe", r"p\.txt: is not UTF-8"),
        ("p.csv", "one", r"'\.csv' is not a format of prompts"),
        ("p", "one", "no suffix"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_prompts(write(tmp_path, name, content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.txt: cannot be read"):
        read_prompts(tmp_path / "none.txt")
