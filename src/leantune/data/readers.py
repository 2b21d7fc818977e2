"""Reads JSON, JSONL, CSV and Parquet files as rows that know their file and line.

JSON, JSONL and CSV are parsed here with the standard library, because other readers lose the
line. Lines end at `\\n` only, so that U+2028 and its kin may stand inside a string.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leantune.errors import DataError


@dataclass(frozen=True)
class Row:
    """One record as it was read. `where` names it for the user; `index` counts from 0 in the source."""

    values: dict[str, Any]
    where: str
    index: int = 0


def read_file(path: Path) -> Iterator[Row]:
    """Rows of a data file, by its suffix. Raises `DataError` naming the file and the line."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path}: {path.suffix or 'a file without a suffix'} is not a data file that can be read; "
            f"use one of {', '.join(READERS)}"
        )
    return reader(path)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            text = _decode(line, path, number)
            if text.strip():
                yield _json_row(text, path, number)


def _json_row(text: str, path: Path, line: int) -> Row:
    where = f"{path}:{line}"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON at column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise DataError(f"{where}: JSON nested too deeply") from error
    return Row(_as_object(value, where), where)


def _read_json(path: Path) -> Iterator[Row]:
    """A list of objects, `{"data": [...]}`, or JSONL under the wrong suffix."""
    text = _decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), path, 1)
    start = text.lstrip()[:1]
    if start == "[":
        yield from _read_json_list(text, path)
        return
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if start == "{" and error.msg == "Extra data":
            yield from _read_jsonl(path)
            return
        raise DataError(
            f"{path}:{error.lineno}: not valid JSON at column {error.colno}: {error.msg}"
        ) from error
    records = value.get("data") if isinstance(value, dict) else None
    if not isinstance(records, list):
        found = f"an object with the keys {', '.join(value)}" if isinstance(value, dict) else _kind(value)
        raise DataError(f'{path}: expected a list of objects or {{"data": [...]}}, found {found}')
    for number, record in enumerate(records, start=1):
        where = f"{path} record {number}"
        yield Row(_as_object(record, where), where)


def _read_json_list(text: str, path: Path) -> Iterator[Row]:
    """Decode the items of a list one by one, so that each row knows the line it starts on."""
    decoder, blank = json.JSONDecoder(), " \t\r\n"
    position = text.index("[") + 1
    line, counted, number = 1, 0, 0
    while True:
        position = _skip(text, position, blank)
        if text[position : position + 1] == "]" and number == 0:
            break
        line, counted = line + text.count("\n", counted, position), position
        number += 1
        where = f"{path}:{line} (record {number})"
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}:{error.lineno} (record {number}): not valid JSON at column {error.colno}: "
                f"{error.msg}"
            ) from error
        yield Row(_as_object(value, where), where)
        position = _skip(text, position, blank)
        if text[position : position + 1] == "]":
            break
        if text[position : position + 1] != ",":
            line += text.count("\n", counted, position)
            raise DataError(f"{path}:{line}: not valid JSON: a comma or ] must follow record {number}")
        position += 1
    rest = text[position + 1 :].strip()
    if rest:
        raise DataError(f"{path}: not valid JSON: {rest[:20]!r} follows the end of the list")


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def _read_csv(path: Path) -> Iterator[Row]:
    text = _decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), path, 1)
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            where = f"{path}:{reader.line_num}"
            if header is None:
                header = _csv_header(cells, where)
            elif cells:
                if len(cells) != len(header):
                    raise DataError(
                        f"{where}: {len(cells)} cells, but the header names {len(header)} columns "
                        f"({', '.join(header)})"
                    )
                yield Row(dict(zip(header, cells, strict=True)), where)
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not valid CSV: {error}") from error


def _csv_header(cells: list[str], where: str) -> list[str]:
    repeated = sorted({cell for cell in cells if cells.count(cell) > 1})
    if repeated:
        raise DataError(f"{where}: the header names {', '.join(map(repr, repeated))} more than once")
    return cells


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield Row(values, f"{path} record {number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file (after record {number}): {error}") from error


def _decode(data: bytes, path: Path, first_line: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not valid UTF-8; save the file as UTF-8"
        ) from error


def _as_object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a record must be an object with named fields, found {_kind(value)}")
    return value


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
