"""How the time of a benchmark is divided, and shown."""

import io
import math

import pytest
from rich.console import Console

from chunkcache.cli.serve_bench.budget import TimeBudget
from chunkcache.cli.serve_bench.clock import VirtualClock
from chunkcache.cli.serve_bench.progress import BenchProgress


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1.0)


def budget(clock: VirtualClock, seconds: float | None, *weights: float) -> TimeBudget:
    made = TimeBudget(clock, seconds)
    for weight in weights:
        made.expect(weight)
    return made


def test_without_a_limit_there_is_always_time(clock) -> None:
    endless = budget(clock, None, 1.0)
    endless.begin(1.0)
    assert endless.left == endless.left_of_part == math.inf


def test_a_part_gets_its_share(clock) -> None:
    made = budget(clock, 100.0, 2.0, 2.0, 1.0)
    made.begin(2.0)
    assert (made.left, made.left_of_part) == (100.0, 40.0)


def test_later_parts_have_what_one_spares(clock) -> None:
    made = budget(clock, 100.0, 1.0, 1.0)
    made.begin(1.0)
    clock.sleep_until(20.0)
    made.begin(1.0)
    assert made.left_of_part == 80.0


def test_later_parts_lack_what_one_takes_too_much(clock) -> None:
    made = budget(clock, 90.0, 1.0, 1.0, 1.0)
    made.begin(1.0)
    clock.sleep_until(50.0)
    made.begin(1.0)
    assert made.left_of_part == 20.0


def test_after_the_end_nothing_is_left(clock) -> None:
    made = budget(clock, 10.0, 1.0)
    clock.sleep_until(12.0)
    made.begin(1.0)
    assert made.left == -2.0
    assert made.left_of_part == 0.0


def test_the_remaining_time_is_never_over_the_limit(clock) -> None:
    console = Console(file=io.StringIO(), width=200)
    with BenchProgress(console, 10**9, budget(clock, 7.0)) as progress:
        progress.advance()
        progress.begin("a run")
    assert "a run (1 of 1000000000 requests, about 7 s left)" in console.file.getvalue()
