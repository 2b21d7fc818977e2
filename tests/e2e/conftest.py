"""What the end-to-end tests share: the server that forks commands, and the tiny model that they train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.ranks import end_all, warm_up
from tests.fixtures import tiny_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of three layers and its tokenizer."""
    warm_up()
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    yield
    end_all()
