"""Folders with tiny models whose linear layers can be packed, made once for all tests of the contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import tiny_tokenizer
from tests.models import save_tiny

FolderOf = Callable[[str], Path]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A tokenizer that the models of all these folders have."""
    return tiny_tokenizer(vocab_size=300)


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> FolderOf:
    """The folder of a wide tiny model by its architecture."""
    root = tmp_path_factory.mktemp("wide")

    def folder_of(architecture: str) -> Path:
        folder = root / architecture
        return folder if folder.exists() else save_tiny(folder, tokenizer, architecture, wide=True)

    return folder_of
