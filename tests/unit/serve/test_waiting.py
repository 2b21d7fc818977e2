"""The line of requests: bounded, in order, batches only of what can be answered together."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from leantune.generate.rows import Row
from leantune.generate.sampling import Sampling
from leantune.serve.errors import RequestError
from leantune.serve.waiting import Job, WaitingLine


def job(generation: str | None = None, heard: list[Any] | None = None) -> Job:
    heard = [] if heard is None else heard
    return Job(Row([1], Sampling(), generation=generation), heard.append)


def test_a_full_line_refuses_and_a_cancelled_job_makes_room() -> None:
    """A client that has gone would keep a place that others are refused."""
    line = WaitingLine(2)
    first = job()
    line.put(first)
    line.put(job())
    with pytest.raises(RequestError, match="2 requests are waiting") as caught:
        line.put(job())
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    first.row.cancelled = True
    line.put(job())
    assert len(line) == 2


def test_a_batch_holds_at_most_so_many_in_order() -> None:
    line = WaitingLine(8)
    jobs = [job() for _ in range(5)]
    for one in jobs:
        line.put(one)
    assert line.take(3, 0) == jobs[:3]
    assert line.taken == jobs[:3]
    assert line.take(3, 0) == jobs[3:]


def test_a_full_batch_does_not_wait() -> None:
    line = WaitingLine(8)
    for _ in range(2):
        line.put(job())
    begin = time.monotonic()
    assert len(line.take(2, 30)) == 2
    assert time.monotonic() - begin < 5


def test_company_that_comes_in_time_shares_the_batch() -> None:
    line = WaitingLine(8)
    line.put(job())
    late = threading.Timer(0.05, lambda: line.put(job()))
    late.start()
    assert len(line.take(2, 30)) == 2


def test_what_edits_other_tokens_is_answered_apart_and_not_forgotten() -> None:
    """One batch has one `generation`; the others keep their turn."""
    line = WaitingLine(8)
    jobs = [job(), job("all"), job(), job("all")]
    for one in jobs:
        line.put(one)
    assert line.take(8, 0) == [jobs[0], jobs[2]]
    assert line.take(8, 0) == [jobs[1], jobs[3]]


def test_a_closed_line_ends_the_worker_and_everybody_who_waits() -> None:
    line = WaitingLine(8)
    heard: list[Any] = []
    line.put(job())
    (running,) = line.take(1, 0)
    line.put(job(heard=heard))
    line.close()
    assert line.take(1, 0) == []
    assert running.row.cancelled
    assert [error.status for error in heard] == [503]
    with pytest.raises(RequestError, match="stopping"):
        line.put(job())


def test_a_worker_that_waits_is_woken_by_the_end() -> None:
    line = WaitingLine(8)
    taken: list[list[Job]] = []
    worker = threading.Thread(target=lambda: taken.append(line.take(1, 0)))
    worker.start()
    line.close()
    worker.join(5)
    assert taken == [[]]
