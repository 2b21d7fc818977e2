"""Keeps encoded records between runs, under a key made of everything that decides about them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leantune.config.cache import cache_root
from leantune.data.records import EncodedRecords
from leantune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Raise it when the same input comes to be encoded differently.
ENCODING_VERSION = 1


def cache_key(
    source_fingerprint: str, settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> str:
    """SHA-256 over the content of the source, the settings of the encoding and the tokenizer."""
    parts = {
        "version": ENCODING_VERSION,
        "source": source_fingerprint,
        "settings": dict(settings),
        "tokenizer": tokenizer_identity(tokenizer),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over what the tokenizer does: vocabulary, rules, special tokens, chat template, class."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        # Left behind by earlier calls; encoding here neither pads nor truncates.
        rules.pop("padding", None)
        rules.pop("truncation", None)
    else:
        rules = {
            "vocab": tokenizer.get_vocab(),
            "arguments": repr(sorted(tokenizer.init_kwargs.items(), key=str)),
        }
    identity = [
        type(tokenizer).__name__,
        rules,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        sorted((i, str(token), token.special) for i, token in tokenizer.added_tokens_decoder.items()),
        tokenizer.chat_template,
    ]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def cached_records(
    key: str, build: Callable[[], EncodedRecords], folder: Path | None = None
) -> tuple[EncodedRecords, str]:
    """The records under this key, built and kept if they are not there, and what happened as a line.

    A broken file is built again. Writers may run at once: each writes its own file and renames it.
    A folder that cannot be written is reported, not fatal.
    """
    path = (folder or cache_root() / "data") / f"{key}.safetensors"
    broken = False
    if path.is_file():
        try:
            return EncodedRecords.load(path), f"encoded records: from the cache ({path})"
        except DataError:
            broken = True
    records = build()
    try:
        _write(records, path)
    except OSError as error:
        return records, f"encoded records: not kept, the cache cannot be written ({error})"
    return records, f"encoded records: kept in {path}" + (", in place of a broken file" if broken else "")


def _write(records: EncodedRecords, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f"{path.stem[:16]}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        records.save(temporary)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
