"""Where leantune keeps what it can rebuild: encoded records and converted models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_root(environ: Mapping[str, str] | None = None) -> Path:
    """The cache folder: `$LEANTUNE_CACHE`, `$XDG_CACHE_HOME/leantune` or `~/.cache/leantune`.

    The folder need not exist. An empty variable counts as unset.
    """
    environ = os.environ if environ is None else environ
    if own := environ.get("LEANTUNE_CACHE"):
        return Path(own).expanduser()
    if shared := environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "leantune"
    return Path.home() / ".cache" / "leantune"
