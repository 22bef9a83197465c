"""The search for the highest rate, on latencies that are known."""

import pytest

from chunkcache.cli.serve_bench.metrics import Run, ServedRequest, Summary, summarise
from chunkcache.cli.serve_bench.search import RateSearch, Trial


def figures(latency_ms: float | None) -> Summary | None:
    """Return those of a run with one request of one token."""
    if latency_ms is None:
        return None
    return summarise(Run([ServedRequest(0.0, [latency_ms / 1e3])], 1, 1))


def search(latency_at, start: float = 1.0, tolerance: float = 0.05, max_trials: int = 50):
    rates = RateSearch(100.0, start, tolerance=tolerance, max_trials=max_trials)
    while (rate := rates.next_rate) is not None:
        rates.note(figures(latency_at(rate)))
    return rates.result


def rising(rps: float) -> float:
    """Latency in ms that passes 100 at 7 requests per second."""
    return 100 * (rps / 7) ** 2


@pytest.mark.parametrize("start", [0.01, 1.0, 6.9, 7.0, 7.1, 500.0])
def test_the_limit_is_found_from_any_start(start: float) -> None:
    result = search(rising, start)
    assert 7 / 1.05 <= result.rps <= 7 < result.missed_rps <= result.rps * 1.05


def test_no_rate_is_tried_twice() -> None:
    rates = [trial.rps for trial in search(rising, 0.1).trials]
    assert len(rates) == len(set(rates))


def test_the_answer_was_tried_and_met_the_limit() -> None:
    result = search(rising)
    assert Trial(result.rps, figures(rising(result.rps))) in result.trials


def test_a_latency_equal_to_the_limit_is_allowed() -> None:
    result = search(lambda rps: 100.0 if rps <= 4 else 101.0, start=4.0)
    assert 4 <= result.rps <= 4 * 1.05


def test_a_stopped_run_counts_as_over_the_limit() -> None:
    result = search(lambda rps: rising(rps) if rps <= 7 else None)
    assert 7 / 1.05 <= result.rps <= 7
    assert any(trial.latency_ms is None for trial in result.trials)


def test_a_finer_tolerance_comes_closer() -> None:
    assert search(rising, tolerance=0.001).rps == pytest.approx(7, rel=0.001)


@pytest.mark.parametrize("start", [6.2, 7.0, 7.8])
def test_from_a_start_near_the_limit_few_trials_are_enough(start: float) -> None:
    assert len(search(rising, start, tolerance=0.15).trials) <= 3


def test_a_search_may_be_left_at_any_trial() -> None:
    rates = RateSearch(100.0, 5.0, tolerance=0.05, max_trials=9)
    rates.note(figures(90.0))
    assert (rates.result.rps, rates.result.missed_rps) == (5.0, None)
    rates.note(None)
    assert (rates.result.rps, rates.result.missed_rps) == (5.0, 6.25)


def test_trials_are_bounded() -> None:
    assert len(search(rising, 0.001, max_trials=5).trials) == 5


def test_without_a_limit_the_rate_is_a_lower_bound() -> None:
    result = search(lambda rps: 1.0, max_trials=4)
    assert result.missed_rps is None
    assert [trial.rps for trial in result.trials] == [1.0, 1.25, 1.25**3, 2 * 1.25**3]
    assert result.rps == 2 * 1.25**3


def test_if_no_rate_meets_the_limit_the_answer_is_zero() -> None:
    result = search(lambda rps: 1000.0, max_trials=3)
    assert result.rps == 0
    assert [trial.rps for trial in result.trials] == pytest.approx([1.0, 0.8, 0.8**3])


@pytest.mark.parametrize(
    ("start", "known", "first"),
    [(5.0, 2.0, 5.0), (5.0, 6.0, 7.5), (9.0, 8.0, 6.4), (9.0, 9.5, 9.0)],
)
def test_what_is_known_bounds_the_first_rate(start: float, known: float, first: float) -> None:
    rates = RateSearch(100.0, start, tolerance=0.05, max_trials=9)
    rates.learn(known, rising(known))
    assert rates.next_rate == pytest.approx(first)


def test_what_is_known_counts_without_a_trial() -> None:
    rates = RateSearch(100.0, 8.0, tolerance=0.2, max_trials=9)
    rates.learn(6.9, rising(6.9))
    rates.note(figures(rising(8.0)))
    assert rates.next_rate is None
    assert (rates.result.rps, rates.result.missed_rps) == (6.9, 8.0)
    assert len(rates.result.trials) == 1


def bounded(start: float, highest: float) -> RateSearch:
    return RateSearch(100.0, start, tolerance=0.05, max_trials=9, highest=highest)


def test_no_rate_above_the_highest_is_tried() -> None:
    rates = bounded(4.0, 6.0)
    while (rate := rates.next_rate) is not None:
        rates.note(figures(rising(rate)))
    assert [trial.rps for trial in rates.result.trials] == [4.0, 5.0, 6.0]
    assert (rates.result.rps, rates.result.missed_rps) == (6.0, None)
    assert rates.result.is_highest


def test_a_highest_rate_over_the_limit_is_not_the_answer() -> None:
    rates = bounded(8.0, 8.0)
    while (rate := rates.next_rate) is not None:
        rates.note(figures(rising(rate)))
    assert 7 / 1.05 <= rates.result.rps <= 7 < rates.result.missed_rps
    assert not rates.result.is_highest
