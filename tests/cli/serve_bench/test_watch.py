"""When a run is stopped, and what is told of it."""

import pytest

from chunkcache.cli.serve_bench.watch import OutOfTimeError, OverLimitError, Watcher
from chunkcache.cli.serve_bench.workload import TimedRequest

# Two requests of ten tokens, at 0 and 5 s.
WORKLOAD = [TimedRequest(0.0, [1], 10), TimedRequest(5.0, [1], 10)]


def test_requests_are_counted_down() -> None:
    finished = []
    watcher = Watcher(WORKLOAD, on_finished=lambda: finished.append(1))
    watcher.finished(1, 6.0)
    assert (watcher.num_unfinished, len(finished)) == (1, 1)


def test_without_a_limit_nothing_is_stopped() -> None:
    Watcher(WORKLOAD).check(1e9)


def test_waiting_requests_count_with_the_time_that_they_have_waited() -> None:
    watcher = Watcher(WORKLOAD, limit_ms=100)
    watcher.check(1.9)  # 0.19 s per token, as if the first ended now; the sum may be 2 x 0.1
    with pytest.raises(OverLimitError):
        watcher.check(2.1)


def test_finished_requests_count_with_what_they_took() -> None:
    watcher = Watcher(WORKLOAD, limit_ms=100)
    watcher.finished(0, 1.0)  # 0.1 s per token
    watcher.check(5.9)
    with pytest.raises(OverLimitError):
        watcher.check(6.1)  # 0.1 + 0.11 > 2 x 0.1


def test_a_run_is_stopped_when_its_time_is_over() -> None:
    watcher = Watcher(WORKLOAD, seconds=20.0)
    watcher.check(20.0)
    with pytest.raises(OutOfTimeError):
        watcher.check(20.1)


def test_a_run_that_has_ended_is_not_stopped() -> None:
    watcher = Watcher(WORKLOAD[:1], seconds=20.0, limit_ms=1.0)
    watcher.finished(0, 30.0)
    watcher.check(30.0)
