"""One thread that owns the model, and answers the waiting requests batch by batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leantune.errors import ConfigError
from leantune.generate.batch import decode_rows
from leantune.generate.rows import Piece, Row
from leantune.serve.errors import RequestError
from leantune.serve.models import Served
from leantune.serve.waiting import Job, WaitingLine

_LONGEST_WAIT_MS = 60_000
_log = logging.getLogger("leantune.serve")


@dataclass(frozen=True)
class Limits:
    """How much is answered at once, how much may wait (requests), how long for company (ms).

    `max_new_tokens`: of answers to requests that do not say. Raises `ConfigError` for what cannot be.
    """

    max_batch: int = 8
    max_queue: int = 64
    max_wait_ms: float = 10.0
    max_new_tokens: int = 512

    def __post_init__(self) -> None:
        least = {"max_batch": 1, "max_queue": 1, "max_wait_ms": 0, "max_new_tokens": 1}
        problems = [
            f"{name}: {getattr(self, name)} is out of range; expected at least {value}"
            for name, value in least.items()
            if not getattr(self, name) >= value
        ]
        if self.max_wait_ms > _LONGEST_WAIT_MS:
            problems.append(
                f"max_wait_ms: {self.max_wait_ms} is out of range; expected at most {_LONGEST_WAIT_MS}"
            )
        if problems:
            raise ConfigError(problems)


class Engine:
    """Answers jobs until it is closed. `batches` counts those that were begun."""

    def __init__(self, served: Served, limits: Limits) -> None:
        self.served = served
        self.limits = limits
        self.batches = 0
        self._line = WaitingLine(limits.max_queue)
        self._worker = threading.Thread(target=self._work, name="leantune-serve", daemon=True)
        self._worker.start()

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._line)

    @property
    def num_running(self) -> int:
        """Requests that are being answered."""
        return len(self._line.taken)

    def submit(self, row: Row, send: Callable[[Piece | RequestError], None]) -> None:
        """Have a row answered; raises `RequestError` if too many wait."""
        self._line.put(Job(row, send))

    def close(self) -> None:
        """Break off what is answered, refuse what waits, and end the thread."""
        self._line.close()
        self._worker.join()

    def _work(self) -> None:
        while jobs := self._line.take(self.limits.max_batch, self.limits.max_wait_ms / 1000):
            self.batches += 1
            try:
                self._answer(jobs)
            except Exception as error:  # the next batch may well be answered
                _log.exception("a batch of %d requests failed", len(jobs))
                for job in jobs:
                    job.send(RequestError(f"{type(error).__name__}: {error}", status=500))

    def _answer(self, jobs: Sequence[Job]) -> None:
        served = self.served
        rows = [job.row for job in jobs]

        def emit(piece: Piece) -> None:
            jobs[piece.row].send(piece)

        decode_rows(served.model, served.tokenizer, rows, served.attached, emit)
