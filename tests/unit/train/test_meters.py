"""Speed counts training alone, and peak memory does not count the libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest

from leantune.train.meters import Throughput


def test_speed_is_that_of_the_recent_steps() -> None:
    speed = Throughput(window=2)
    assert speed.tokens_per_second == 0.0
    assert speed.seconds_left(5) is None
    for tokens, seconds in [(100, 100.0), (100, 1.0), (300, 3.0)]:
        speed.step(tokens, seconds)
    assert speed.tokens_per_second == pytest.approx(100.0)
    assert speed.seconds_left(10) == pytest.approx(20.0)


def test_a_step_without_measurable_time_is_no_division_by_zero() -> None:
    speed = Throughput()
    speed.step(10, 0.0)
    assert speed.tokens_per_second == 0.0
    assert speed.seconds_left(3) == 0.0


MEASURE = """
import mmap
from leantune.train.meters import memory_baseline, peak_memory_gib

def hold(mib):
    block = mmap.mmap(-1, mib << 20)
    for page in range(0, mib << 20, 4096):
        block[page] = 1
    block.close()

hold(96)
baseline = memory_baseline()
before = peak_memory_gib("cpu")
hold(64)
after = peak_memory_gib("cpu")
print(baseline * 1024, before * 1024, after * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_what_was_used_after_the_baseline() -> None:
    """Memory that was freed again counts; a higher peak before the baseline does not hide it."""
    out = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True).stdout
    baseline, before, after = map(float, out.split())
    assert 0 < baseline < 90
    assert before < 8
    assert 56 < after < 80
