"""Requests that wait for the model: a bounded line, from which batches are taken. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING

from leantune.serve.errors import RequestError, stopping

if TYPE_CHECKING:
    from leantune.generate.rows import Piece, Row


@dataclass(eq=False)
class Job:
    """A row that waits or is answered. `send` gets its pieces, or the error that ends it, in any thread."""

    row: Row
    send: Callable[[Piece | RequestError], None]
    arrived: float = field(default_factory=time.monotonic)


class WaitingLine:
    """At most `limit` jobs in the order in which they came; cancelled ones leave by themselves.

    `taken` are the jobs of the last batch, until the next one is asked for.
    """

    def __init__(self, limit: int) -> None:
        self.taken: list[Job] = []
        self._limit = limit
        self._jobs: list[Job] = []
        self._changed = Condition()
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            self._forget_cancelled()
            return len(self._jobs)

    def put(self, job: Job) -> None:
        """Join the line; raises `RequestError` if it is full (429) or closed (503)."""
        with self._changed:
            self._forget_cancelled()
            if self._closed:
                raise stopping()
            if len(self._jobs) >= self._limit:
                raise RequestError(
                    f"{len(self._jobs)} requests are waiting, and no more may; try again later",
                    status=429,
                    code="queue_full",
                )
            self._jobs.append(job)
            self._changed.notify_all()

    def take(self, most: int, wait_s: float) -> list[Job]:
        """The next batch: the first job and those that go with it; empty once the line is closed.

        Waits for a first job, then until there are `most`, or the first has been here for `wait_s`.
        """
        with self._changed:
            self.taken = []
            while not self._closed:
                batch = self._batch(most)
                if batch and (len(batch) == most or time.monotonic() >= batch[0].arrived + wait_s):
                    self._jobs = [job for job in self._jobs if job not in batch]
                    self.taken = batch
                    return batch
                rest = batch[0].arrived + wait_s - time.monotonic() if batch else None
                self._changed.wait(rest)
            return []

    def close(self) -> None:
        """Let nobody in any more, refuse who waits, and break off what was taken."""
        with self._changed:
            self._closed, left, self._jobs = True, self._jobs, []
            for job in left:
                job.send(stopping())
            for job in self.taken:
                job.row.cancelled = True
            self._changed.notify_all()

    def _batch(self, most: int) -> list[Job]:
        """Jobs that can be answered together: what is edited at generation is said once for a batch."""
        self._forget_cancelled()
        return [job for job in self._jobs if job.row.generation == self._jobs[0].row.generation][:most]

    def _forget_cancelled(self) -> None:
        self._jobs = [job for job in self._jobs if not job.row.cancelled]
