"""Sharing on beside sharing off."""

import pytest

from chunkcache.cli.serve_bench.experiments import Experiment
from chunkcache.cli.serve_bench.goals import goals_of
from chunkcache.cli.serve_bench.metrics import Run, ServedRequest, Summary, summarise
from chunkcache.cli.serve_bench.results import ContenderResult, ExperimentResult
from chunkcache.cli.serve_bench.search import SearchResult
from chunkcache.cli.serve_bench.workload import Row


def summary_of(seconds: float, kv_bytes: int = 1) -> Summary:
    return summarise(Run([ServedRequest(0.0, [seconds])], kv_bytes, 1))


def half(seconds: float, kv_bytes: int, rps: float | None = None) -> ContenderResult:
    summary = summary_of(seconds, kv_bytes)
    search = None if rps is None else SearchResult(rps, None, [])
    return ContenderResult(summaries=[summary], search=search)


def goals(row: Row | None, on: ContenderResult, off: ContenderResult) -> dict:
    experiment = Experiment("row", [], row, {})
    result = ExperimentResult(experiment, {"sharing on": on, "sharing off": off})
    return {goal.name: goal for goal in goals_of(result)}


def test_memory_is_what_sharing_saves() -> None:
    found = goals(Row(1024, 1024, 8, 1.0), half(1, 20), half(1, 100))["K/V memory saved"]
    assert (found.value, found.is_met) == (pytest.approx(0.8), True)


def test_too_little_memory_saved_is_missed() -> None:
    found = goals(Row(1024, 1024, 8, 1.0), half(1, 40), half(1, 100))["K/V memory saved"]
    assert found.is_met is False


@pytest.mark.parametrize(("seconds", "is_met"), [(1.02, True), (1.04, False), (0.9, True)])
def test_without_a_shared_prefix_little_may_be_lost(seconds: float, is_met: bool) -> None:
    found = goals(Row(1024, 0, 8, 1.0), half(seconds, 1), half(1, 1))["latency lost"]
    assert (found.value, found.is_met) == (pytest.approx(seconds - 1), is_met)


@pytest.mark.parametrize(
    ("n_p", "ratio", "is_met"),
    [(1024, 1.6, True), (1024, 1.5, False), (2048, 2.3, True), (2048, 2.2, False), (64, 9, None)],
)
def test_the_rates_are_compared(n_p: int, ratio: float, is_met: bool | None) -> None:
    on, off = half(1, 1, ratio * 10), half(1, 1, 10.0)
    found = goals(Row(n_p, n_p, 8, 1.0), on, off)["request rate, on / off"]
    assert (found.value, found.is_met) == (pytest.approx(ratio), is_met)


def test_a_partly_shared_row_has_figures_without_bounds() -> None:
    found = goals(Row(1024, 512, 8, 1.0), half(1, 1, 2.0), half(1, 1, 1.0))
    assert {goal.is_met for goal in found.values()} == {None}


def test_a_trace_has_figures_without_bounds() -> None:
    assert {goal.is_met for goal in goals(None, half(1, 1), half(1, 1)).values()} == {None}


def test_without_one_of_the_halves_there_is_nothing_to_compare() -> None:
    assert goals(Row(8, 8, 8, 1.0), half(1, 1), ContenderResult(failure="broken")) == {}


@pytest.mark.parametrize(("seconds", "is_met"), [(1.02, True), (1.05, False), (0.9, True)])
def test_without_a_shared_prefix_little_throughput_may_be_lost(
    seconds: float, is_met: bool
) -> None:
    on = ContenderResult(throughputs=[summary_of(seconds)])
    off = ContenderResult(throughputs=[summary_of(1.0)])
    found = goals(Row(1024, 0, 8, 1.0), on, off)["throughput lost"]
    assert (found.value, found.is_met) == (pytest.approx(1 - 1 / seconds), is_met)


def test_runs_are_compared_with_those_beside_them() -> None:
    # The machine is twice as slow at times, for both halves alike.
    on = ContenderResult(throughputs=[summary_of(s) for s in (1.0, 2.0, 2.0)])
    off = ContenderResult(throughputs=[summary_of(s) for s in (1.0, 2.0, 1.0)])
    assert goals(Row(8, 0, 8, 1.0), on, off)["throughput lost"].value == 0


def test_the_rates_ratio_lies_between_what_was_met_and_missed() -> None:
    on = ContenderResult(search=SearchResult(8.0, 10.0, []))
    off = ContenderResult(search=SearchResult(4.0, 5.0, []))
    found = goals(Row(1024, 1024, 8, 1.0), on, off)["request rate, on / off"]
    assert (found.least, found.value, found.most) == (1.6, 2.0, 2.5)


def test_if_no_rate_was_low_enough_for_off_the_ratio_is_the_least_possible() -> None:
    on = ContenderResult(search=SearchResult(8.0, None, []))
    off = ContenderResult(search=SearchResult(0.0, 2.0, []))
    found = goals(Row(1024, 1024, 8, 1.0), on, off)["request rate, on / off"]
    assert (found.least, found.value, found.most) == (4.0, 4.0, None)
