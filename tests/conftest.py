"""Settings of all tests: nothing is fetched, nothing of the user's cache is touched, one thread."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_CACHE = tempfile.TemporaryDirectory(prefix="leantune-tests-")
os.environ["LEANTUNE_CACHE"] = _CACHE.name


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums in one order on every machine; tiny matrices gain nothing from threads."""
    import torch

    torch.set_num_threads(1)
    yield
    _CACHE.cleanup()
