"""Where records come from: a local file, a folder, or a data set of the hub."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leantune.data.readers import READERS, Row, read_file
from leantune.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

# How a file of a folder tells its split: by the word that its name starts with.
SPLIT_WORDS = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}


@dataclass(frozen=True)
class Source:
    """Readable records. `fingerprint` changes whenever their content does; None: do not cache."""

    name: str
    read: Callable[[], Iterator[Row]]
    fingerprint: Callable[[], str | None]

    def rows(self) -> Iterator[Row]:
        """All rows, numbered from 0."""
        for index, row in enumerate(self.read()):
            yield replace(row, index=index)


def open_source(
    name: str, *, subset: str | None = None, split: str = "train", default_split: str = "train"
) -> Source:
    """Find the records called `name`; nothing of a local file is read yet.

    A file has neither subsets nor splits, so a subset or a split other than `default_split` is
    refused for it. Raises `DataError` if there is no such source, saying what was tried.
    """
    path = Path(name).expanduser()
    if path.is_file():
        _refuse_subset(name, subset, "a file")
        if split != default_split:
            raise DataError(f"split {split!r}: {name} is a file, which has no splits; remove the key")
        return Source(name, lambda: read_file(path), lambda: _hash_files(path.parent, [path]))
    if path.is_dir():
        _refuse_subset(name, subset, "a folder")
        return _open_folder(name, path, split, default_split)
    if _looks_local(name):
        raise DataError(f"{name}: no such file or folder (looked at {path.absolute()}){_near(path)}")
    return _open_hub(name, path, subset, split)


def rows_source(name: str, rows: list[dict[str, Any]]) -> Source:
    """A source of rows that are in memory already."""

    def read() -> Iterator[Row]:
        for number, values in enumerate(rows, start=1):
            yield Row(values, f"{name} record {number}")

    return Source(name, read, lambda: hashlib.sha256(repr(rows).encode()).hexdigest())


def _refuse_subset(name: str, subset: str | None, kind: str) -> None:
    if subset is not None:
        raise DataError(f"subset {subset!r}: {name} is {kind}; only hub data sets have subsets")


def _looks_local(name: str) -> bool:
    path = Path(name)
    return (
        path.suffix.lower() in READERS
        or name.startswith(("/", "./", "../", "~"))
        or name.count("/") > 1
        or not name.strip()
    )


def _near(path: Path) -> str:
    """A did-you-mean among the files that stand beside the missing one."""
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, 1, 0.6)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _open_folder(name: str, path: Path, split: str, default_split: str) -> Source:
    saved = any((path / marker).is_file() for marker in ("dataset_dict.json", "dataset_info.json"))
    if saved:
        files = sorted(p for p in path.rglob("*") if p.is_file())
        dataset = _load_saved(name, path, split, default_split)
        return Source(name, lambda: _dataset_rows(name, dataset), lambda: _hash_files(path, files, split))
    files = _files_of_split(name, path, split, default_split)

    def read() -> Iterator[Row]:
        for file in files:
            yield from read_file(file)

    return Source(name, read, lambda: _hash_files(path, files))


def _files_of_split(name: str, path: Path, split: str, default_split: str) -> list[Path]:
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in READERS)
    if not files:
        raise DataError(
            f"{name}: the folder holds neither a saved `datasets` data set nor files with one of the "
            f"suffixes {', '.join(READERS)}"
        )
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(path)), []).append(file)
    chosen = by_split.get(SPLIT_WORDS.get(split, split))
    if not chosen and split == default_split:
        chosen = by_split.get("")
    if not chosen:
        found = "; ".join(
            f"{key or 'no split named'}: {', '.join(p.name for p in group)}"
            for key, group in by_split.items()
        )
        raise DataError(f"{name}: no file for the split {split!r} (found {found})")
    return chosen


def _split_of(path: Path) -> str:
    """`train-00001.parquet` and `test/a.jsonl` name their split; other files name none ("")."""
    for part in (path.stem, *reversed(path.parent.parts)):
        word = part.lower().replace("_", "-").replace(".", "-").partition("-")[0]
        if word in SPLIT_WORDS:
            return SPLIT_WORDS[word]
    return ""


def _load_saved(name: str, path: Path, split: str, default_split: str) -> Dataset:
    from datasets import Dataset, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{name}: not a readable `datasets` folder: {error}") from error
    if isinstance(loaded, Dataset):
        if split != default_split and str(loaded.split) != split:
            raise DataError(f"split {split!r}: {name} holds a single data set without splits")
        return loaded
    if split not in loaded:
        raise DataError(f"{name}: no split {split!r}; the folder has {', '.join(map(str, loaded))}")
    return loaded[split]


def _open_hub(name: str, path: Path, subset: str | None, split: str) -> Source:
    from datasets import Dataset, load_dataset

    try:
        dataset = load_dataset(name, subset, split=split)
    except Exception as error:  # the hub client raises many unrelated kinds; all mean "not loaded"
        wanted = f"{name} (subset {subset or 'default'}, split {split})"
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(
            f"{name}: neither a file nor a folder (looked at {path.absolute()}){_near(path)}, "
            f"and the hub data set {wanted} could not be loaded: {reason}"
        ) from error
    if not isinstance(dataset, Dataset):
        raise DataError(f"{name}: the split {split!r} is not a plain table of records")
    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    folder = files[0].parent if files else path
    return Source(
        name, lambda: _dataset_rows(name, dataset), lambda: _hash_files(folder, files) if files else None
    )


def _dataset_rows(name: str, dataset: Iterable[Any]) -> Iterator[Row]:
    for number, values in enumerate(dataset, start=1):
        yield Row(values, f"{name} record {number}")


def _hash_files(folder: Path, files: list[Path], *extra: str) -> str:
    """SHA-256 over the content and the relative names of the files; a lone file's name is left out."""
    digest = hashlib.sha256(repr(extra).encode())
    for file in files:
        label = file.suffix.lower() if len(files) == 1 else file.relative_to(folder).as_posix()
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"{label}\0{content}\0".encode())
    return digest.hexdigest()
