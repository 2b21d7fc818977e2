"""Prompts to try a model with, from a text, JSON or JSONL file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leantune.errors import DataError

FIELDS = ("prompt", "question", "instruction")


def read_prompts(path: str | Path) -> list[str]:
    """Prompts of a `.txt` file (one a line), or of `.jsonl` / `.json` (texts, or objects with a prompt).

    An object's prompt is its field `prompt`, `question` or `instruction`. Blank lines are
    skipped. Raises `DataError` with file and line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); expected a file of prompts") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error}); save it as UTF-8") from error
    # Only real line ends: a U+2028 inside a JSON string does not end the line.
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    match path.suffix.lower():
        case ".txt":
            prompts = [line.strip() for _, line in lines]
        case ".jsonl":
            prompts = [_prompt(_json(line, path, n), f"{path}:{n}") for n, line in lines]
        case ".json":
            prompts = _from_list(_json(text, path, 1), path)
        case other:
            raise DataError(
                f"{path}: {other or 'no suffix'!r} is not a format of prompts; use .txt, .jsonl, .json"
            )
    if not prompts:
        raise DataError(f"{path}: there are no prompts in it")
    return prompts


def _json(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{first_line + error.lineno - 1}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise DataError(f"{path}:{first_line}: nested too deeply; expected a text or an object") from error


def _from_list(values: Any, path: Path) -> list[str]:
    if not isinstance(values, list):
        raise DataError(f"{path}: is {type(values).__name__} at its top; expected a list of prompts")
    return [_prompt(value, f"{path}: item {number}") for number, value in enumerate(values, start=1)]


def _prompt(value: Any, where: str) -> str:
    if isinstance(value, dict):
        field = next((name for name in FIELDS if value.get(name) is not None), None)
        if field is None:
            raise DataError(
                f"{where}: none of the fields {', '.join(FIELDS)}; it has {', '.join(value) or 'none'}"
            )
        value, where = value[field], f"{where}: field `{field}`"
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {value!r:.60} is not a prompt; expected text that is not empty")
    return value
