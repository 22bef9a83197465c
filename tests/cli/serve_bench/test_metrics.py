"""Figures against values computed by hand."""

import pytest

from chunkcache.cli.serve_bench.metrics import Percentiles, Run, ServedRequest, summarise

# Arrivals at 1 and 2 s; two tokens and three.
FIRST = ServedRequest(1.0, [1.5, 2.0])
SECOND = ServedRequest(2.0, [2.1, 2.2, 2.6])
RUN = Run([FIRST, SECOND], peak_kv_bytes=1000, peak_batch=2, num_prompt_tokens_computed=9)


def test_time_to_first_token_counts_from_the_arrival() -> None:
    assert FIRST.time_to_first_token == 0.5


def test_normalised_latency_is_the_time_in_the_system_over_the_tokens() -> None:
    assert FIRST.normalised_latency == 0.5
    assert SECOND.normalised_latency == pytest.approx(0.2)


def test_gaps_are_between_neighbouring_tokens() -> None:
    assert SECOND.gaps == pytest.approx([0.1, 0.4])


def test_a_single_token_has_no_gaps() -> None:
    assert ServedRequest(0.0, [1.0]).gaps == []


def test_the_mean_is_over_requests_not_over_tokens() -> None:
    assert summarise(RUN).normalised_latency_ms == pytest.approx(350)


def test_throughput_counts_from_the_first_arrival_to_the_last_token() -> None:
    summary = summarise(RUN)
    assert summary.requests_per_second == pytest.approx(2 / 1.6)
    assert summary.tokens_per_second == pytest.approx(5 / 1.6)


def test_percentiles_lie_between_their_neighbours() -> None:
    percentiles = Percentiles.of([0.0, 0.1, 0.2, 0.3, 0.4])
    assert percentiles == Percentiles(*map(pytest.approx, (200, 360, 396)))


def test_nothing_has_no_percentiles() -> None:
    assert Percentiles.of([]) is None


def test_inter_token_latency_pools_the_gaps_of_all_requests() -> None:
    # 0.5 of the first, 0.1 and 0.4 of the second.
    assert summarise(RUN).inter_token_latency == Percentiles(*map(pytest.approx, (400, 480, 498)))


def test_time_to_first_token_percentiles_are_over_requests() -> None:
    assert summarise(RUN).time_to_first_token == Percentiles(*map(pytest.approx, (300, 460, 496)))


def test_answers_of_one_token_leave_the_gaps_unmeasured() -> None:
    summary = summarise(Run([ServedRequest(0.0, [2.0])], 1, 1))
    assert summary.inter_token_latency is None
    assert summary.normalised_latency_ms == 2000


def test_peaks_are_those_of_the_run() -> None:
    summary = summarise(RUN)
    assert (summary.peak_kv_bytes, summary.peak_batch) == (1000, 2)
    assert summary.num_prompt_tokens_computed == 9
