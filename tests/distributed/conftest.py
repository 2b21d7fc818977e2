"""The tiny model that the distributed tests train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures import tiny_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of three layers and its tokenizer."""
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")
