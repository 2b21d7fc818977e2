"""The exceptions that leantune raises on purpose; the command line prints them without a traceback."""

from __future__ import annotations

from collections.abc import Sequence


class LeantuneError(Exception):
    """Base of all errors whose message is meant for the user."""


class ConfigError(LeantuneError):
    """A run configuration that cannot be obeyed. Carries every problem found, not just the first."""

    def __init__(self, problems: Sequence[str] | str, source: str | None = None) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        self.source = source
        count = len(self.problems)
        where = f" in {source}" if source else ""
        head = f"{count} problem{'s' if count != 1 else ''}{where}:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))


class DataError(LeantuneError):
    """Records that cannot be read or used; the message names the file, the line and the field."""


class ModelError(LeantuneError):
    """A model, tokenizer or module selection that cannot be used."""


class CheckpointError(LeantuneError):
    """A saved run, checkpoint or adapter that is missing, broken, or not what was in memory."""


class NumericsError(LeantuneError):
    """A loss or gradient that is not finite; the message names the samples."""


class LaunchError(LeantuneError):
    """Worker processes that could not be started, or of which one failed."""
