"""The weights of a checkpoint by the model's own names, read row by row from safetensors files.

Names in files differ from those in a model: prefixes come and go, a tied head may be absent,
experts are stored one by one and used stacked. transformers keeps the rules for that; here they
are asked once for all names, and a tensor is read only when a rank wants rows of it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.hub import cached_file

from leantune.errors import ModelError
from leantune.models.source import ModelSource

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class WeightFiles:
    """The safetensors files of a model: which file holds which tensor, and rows of them.

    Raises `ModelError` if there are none, or if one cannot be read. Files are open inside `reading()`.
    """

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.path_of = _locate(source)
        self._open: dict[Path, Any] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Files stay open (mapped) between the reads of this context."""
        try:
            yield
        finally:
            self._open.clear()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def whole(self, name: str) -> Tensor:
        """A whole tensor; its memory is the mapped file's where that is possible."""
        return self._found(name, "get_tensor")

    def rows(self, name: str, start: int, stop: int, *, columns: bool = False) -> Tensor:
        """Rows `start` to `stop` of a tensor (of a matrix also its columns)."""
        part = self._slice(name)
        return part[:, start:stop] if columns else part[start:stop]

    def _slice(self, name: str) -> Any:
        return self._found(name, "get_slice")

    def _found(self, name: str, how: str) -> Any:
        file = self._file(name)
        try:
            return getattr(file, how)(name)
        except SafetensorError as error:
            raise ModelError(
                f"model.name: {self.path_of[name]} does not hold {name}, although the index says so: {error}"
            ) from error

    def _file(self, name: str) -> Any:
        path = self.path_of[name]
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, "pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"model.name: {path} cannot be read as safetensors: {error}") from error
        return self._open[path]


@dataclass
class _Entry:
    """How one weight of the model is made: a tensor of the files as it is, or several put together."""

    keys: list[tuple[str, str]] = field(default_factory=list)  # (pattern, name in the files)
    converter: WeightConverter | None = None


class WeightMap:
    """The weights of `model` (built without weights, still with its own layers) in `files`."""

    def __init__(self, model: PreTrainedModel, files: WeightFiles) -> None:
        self.files = files
        self._model = model
        self._entries: dict[str, _Entry] = {}
        self._last: tuple[_Entry, dict[str, Tensor]] | None = None
        self._targets: dict[int, str] = {}
        self.unused = self._map(model)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def keys_of(self, name: str) -> list[str]:
        """Names in the files of the tensors that this weight is made of."""
        return [key for _, key in self._entries[name].keys]

    def is_plain(self, name: str) -> bool:
        """Whether the weight lies in a file as it is."""
        return self._entries[name].converter is None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that the weight has in the files."""
        entry = self._entries[name]
        if entry.converter is None:
            return self.files.shape(entry.keys[0][1])
        return tuple(self._converted(name, entry).shape)

    def whole(self, name: str) -> Tensor:
        """The whole weight."""
        entry = self._entries[name]
        return self.files.whole(entry.keys[0][1]) if entry.converter is None else self._converted(name, entry)

    def rows(self, name: str, start: int, stop: int, *, columns: bool = False) -> Tensor:
        """Rows `start` to `stop` of a weight of at least one dimension (of a matrix also its columns)."""
        entry = self._entries[name]
        if entry.converter is None:
            return self.files.rows(entry.keys[0][1], start, stop, columns=columns)
        whole = self._converted(name, entry)
        return whole[:, start:stop] if columns else whole[start:stop]

    def _map(self, model: PreTrainedModel) -> list[str]:
        """Find the place of each tensor of the files; returns the names of those that have none."""
        transforms = get_model_conversion_mapping(model)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        names: dict[str, Any] = dict(model.state_dict())
        unused: list[str] = []
        for key in sorted(self.files.path_of, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
            if target not in names and key in names:
                target, pattern = key, None
            if target not in names:
                unused.append(key)
                continue
            entry = self._entries.setdefault(target, _Entry())
            if pattern is None:
                entry.keys = [(key, key)]
                continue
            if entry.converter is None:
                entry.converter = by_pattern[pattern]
                self._targets[id(entry)] = target
                first, *others = entry.converter.target_patterns
                for other in others:
                    self._entries[target.replace(first, other)] = entry
            entry.keys.append((pattern, key))
        return unused

    def _converted(self, name: str, entry: _Entry) -> Tensor:
        """A weight that transformers' operations make of several tensors; the last ones are kept."""
        if self._last is None or self._last[0] is not entry:
            self._last = None
            converter = copy.deepcopy(entry.converter)
            assert converter is not None
            target = self._targets[id(entry)]
            for pattern, key in entry.keys:
                converter.add_tensor(target, key, pattern, self.files.whole(key))  # pyright: ignore[reportArgumentType]
            try:
                made: dict[str, Any] = converter.convert(target, model=self._model, config=self._model.config)
            except (RuntimeError, ValueError, KeyError, IndexError) as error:
                keys = ", ".join(self.keys_of(name)[:3])
                raise ModelError(
                    f"model.name: {self.files.source.name}: {name} cannot be put together from the "
                    f"{len(entry.keys)} tensors of the checkpoint that belong to it ({keys}, ...): {error}; "
                    "is the checkpoint complete?"
                ) from error
            self._last = (
                entry,
                {k: v[0] if isinstance(v, list) else v for k, v in made.items()},
            )
        return self._last[1][name]

    def forget(self) -> None:
        """Let go of what the last conversion made."""
        self._last = None


def _locate(source: ModelSource) -> dict[str, Path]:
    """Which file holds each tensor; files of a hub model are fetched into its cache."""
    index = _find(source, _INDEX)
    if index is not None:
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"model.name: {index} is not an index of safetensors files: {error!r}"
            ) from error
        paths = {file: _find(source, file) for file in names}
        absent = [file for file, path in paths.items() if path is None]
        if absent:
            raise ModelError(f"model.name: {source.name} lacks {', '.join(absent[:5])}, which {index} names")
        return {name: path for name, file in weight_map.items() if (path := paths[file]) is not None}
    single = _find(source, _SINGLE)
    if single is not None:
        return dict.fromkeys(_names_in(single), single)
    if any(_find(source, file) is not None for file in _PICKLED):
        raise ModelError(
            f"model.name: {source.name} has pickled weights (.bin) only, and those are never read; "
            "convert it once on a machine where you trust the file: transformers' from_pretrained, then "
            "save_pretrained"
        )
    raise ModelError(
        f"model.name: {source.name} has no {_SINGLE}; expected a Hugging Face model with weights"
    )


def _find(source: ModelSource, file: str) -> Path | None:
    folder = Path(source.location)
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    found = cached_file(
        source.location,
        file,
        revision=source.revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None


def _names_in(path: Path) -> Iterable[str]:
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model.name: {path} cannot be read as safetensors: {error}") from error
