"""Files that other readers misread: BOMs, line separators in strings, broken rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from leantune.data.readers import read_file
from leantune.errors import DataError


def _write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def _read(path: Path, content: str | bytes) -> list[tuple[dict[str, object], str]]:
    return [(row.values, row.where) for row in read_file(_write(path, content))]


def test_jsonl_with_bom_crlf_and_u2028_keeps_rows_and_lines(tmp_path: Path) -> None:
    """U+2028 inside a string split the record, or a BOM or CR ended up in it."""
    file = tmp_path / "a.jsonl"
    rows = _read(file, '\ufeff{"text": "a\u2028b"}\r\n\r\n{"text": "c"}\r\n')
    assert rows == [({"text": "a\u2028b"}, f"{file}:1"), ({"text": "c"}, f"{file}:3")]


def test_json_list_knows_the_line_of_each_record(tmp_path: Path) -> None:
    """An error in a JSON list could not be found in the file."""
    file = tmp_path / "a.json"
    rows = _read(file, '\ufeff[\n{"text": "a\u2028"},\n\n  {"text":\n "b"}]\n')
    assert [values["text"] for values, _ in rows] == ["a\u2028", "b"]
    assert [where for _, where in rows] == [f"{file}:2 (record 1)", f"{file}:4 (record 2)"]


def test_json_with_a_data_list_and_jsonl_under_json_are_read(tmp_path: Path) -> None:
    """Both shapes are in circulation and were refused."""
    assert _read(tmp_path / "a.json", '{"data": [{"text": "a"}]}')[0][0] == {"text": "a"}
    lines = _read(tmp_path / "b.json", '{"text": "a"}\n{"text": "b"}\n')
    assert [values for values, _ in lines] == [{"text": "a"}, {"text": "b"}]


def test_empty_json_list_gives_no_rows(tmp_path: Path) -> None:
    assert _read(tmp_path / "a.json", " [ ] ") == []


def test_csv_with_bom_crlf_and_newlines_in_cells(tmp_path: Path) -> None:
    """The BOM became part of the first column's name, or a quoted newline shifted the lines."""
    file = tmp_path / "a.csv"
    rows = _read(file, '\ufeffprompt,completion\r\n"a\nb",c\r\n\r\nd,"e ""f"""\r\n')
    assert rows[0] == ({"prompt": "a\nb", "completion": "c"}, f"{file}:3")
    assert rows[1] == ({"prompt": "d", "completion": 'e "f"'}, f"{file}:5")


def test_parquet_rows_are_numbered(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), file)
    assert [(row.values, row.where) for row in read_file(file)] == [
        ({"text": "a"}, f"{file} record 1"),
        ({"text": None}, f"{file} record 2"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "a.jsonl:2: not valid JSON"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', "a.jsonl:2: a record must be an object"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl:2: byte 0xff is not valid UTF-8"),
        ("a.json", '[{"a": 1},\n{"a": }]', "a.json:2 (record 2): not valid JSON"),
        ("a.json", '[{"a": 1}\n{"a": 2}]', "a.json:2: not valid JSON: a comma"),
        ("a.json", '[{"a": 1},\n 7]', "a.json:2 (record 2): a record must be an object"),
        ("a.json", '[{"a": 1},\n]', "a.json:2 (record 2): not valid JSON"),
        ("a.json", '[{"a": 1}] x', "follows the end of the list"),
        ("a.json", '{"rows": []}', "expected a list of objects"),
        ("a.json", b'[{"a": "b"},\n{"a": "\xff"}]', "a.json:2: byte 0xff"),
        ("a.csv", "a,b\n1\n", "a.csv:2: 1 cells, but the header names 2 columns (a, b)"),
        ("a.csv", "a,a\n1,2\n", "'a' more than once"),
        ("a.csv", 'a,b\n1,"x\n', "not valid CSV"),
        ("a.parquet", "nothing", "not a readable Parquet file"),
        ("a.txt", "nothing", "use one of .json"),
    ],
)
def test_broken_files_name_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, expected: str
) -> None:
    with pytest.raises(DataError) as error:
        _read(tmp_path / name, content)
    assert expected in str(error.value)
