"""Poisson workloads: what is drawn, and what is shared."""

import numpy as np
import pytest

from chunkcache.cli.serve_bench.workload import (
    Row,
    TimedRequest,
    poisson_arrivals,
    poisson_workload,
)
from chunkcache.errors import InvalidConfigError

VOCAB_SIZE = 1000


def make(row: Row, num_requests: int = 20, num_prefixes: int = 1, seed: int = 0):
    return poisson_workload(
        row, num_requests, num_prefixes=num_prefixes, vocab_size=VOCAB_SIZE, seed=seed
    )


def common(a: TimedRequest, b: TimedRequest) -> int:
    pairs = zip(a.prompt, b.prompt, strict=True)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(a.prompt))


def test_a_row_is_read_from_text() -> None:
    assert Row.parse("1024,512,64,0.5") == Row(1024, 512, 64, 0.5)


@pytest.mark.parametrize("text", ["", "1,1,1", "1,1,1,1,1", "a,1,1,1", "1.5,1,1,1", "8,0,8,fast"])
def test_a_malformed_row_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="row is"):
        Row.parse(text)


@pytest.mark.parametrize("text", ["0,0,1,1", "8,9,1,1", "8,-1,1,1", "8,0,0,1"])
def test_lengths_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="allowed is"):
        Row.parse(text)


@pytest.mark.parametrize("rps", ["0", "-1", "nan", "inf"])
def test_a_rate_that_is_none_is_refused(rps: str) -> None:
    with pytest.raises(InvalidConfigError, match="rps"):
        Row.parse(f"8,0,8,{rps}")


def test_scaling_multiplies_lengths_and_leaves_the_rate() -> None:
    assert Row(1024, 512, 64, 0.5).scaled(0.25) == Row(256, 128, 16, 0.5)


def test_a_wholly_shared_prompt_stays_so_when_scaled() -> None:
    scaled = Row(1023, 1023, 7, 1.0).scaled(0.3)
    assert scaled.n_s == scaled.n_p == 307


def test_scaling_leaves_at_least_one_token() -> None:
    assert Row(8, 8, 8, 1.0).scaled(0.001) == Row(1, 1, 1, 1.0)


def test_requests_have_the_lengths_of_the_row() -> None:
    requests = make(Row(50, 20, 7, 1.0))
    assert {(len(r.prompt), r.num_output_tokens) for r in requests} == {(50, 7)}


def test_prompts_share_the_prefix_and_no_more() -> None:
    first, *others = make(Row(50, 20, 7, 1.0))
    assert {common(first, other) for other in others} == {20}


def test_unshared_prompts_differ_from_the_first_token() -> None:
    first_tokens = [request.prompt[0] for request in make(Row(50, 0, 7, 1.0), 100)]
    assert len(set(first_tokens)) == 100


def test_wholly_shared_prompts_are_equal() -> None:
    assert len({tuple(request.prompt) for request in make(Row(50, 50, 7, 1.0))}) == 1


def test_every_prefix_is_used_and_differs_from_the_first_token() -> None:
    requests = make(Row(30, 20, 7, 1.0), 200, num_prefixes=4)
    assert len({tuple(request.prompt[:20]) for request in requests}) == 4
    assert len({request.prompt[0] for request in requests}) == 4


def test_tokens_are_in_the_vocabulary() -> None:
    tokens = np.concatenate([request.prompt for request in make(Row(500, 0, 7, 1.0))])
    assert tokens.min() >= 0
    assert tokens.max() < VOCAB_SIZE


def test_equal_seeds_give_equal_workloads() -> None:
    assert make(Row(50, 20, 7, 2.0), seed=5) == make(Row(50, 20, 7, 2.0), seed=5)


def test_other_seeds_give_other_workloads() -> None:
    one, other = make(Row(50, 20, 7, 2.0), seed=5), make(Row(50, 20, 7, 2.0), seed=6)
    assert all(a.arrival != b.arrival for a, b in zip(one, other, strict=True))
    assert all(a.prompt != b.prompt for a, b in zip(one, other, strict=True))


def test_arrivals_do_not_depend_on_the_lengths() -> None:
    one, other = make(Row(50, 20, 7, 2.0)), make(Row(8, 0, 1, 2.0))
    assert [r.arrival for r in one] == [r.arrival for r in other]


def test_a_rate_only_scales_the_arrivals() -> None:
    np.testing.assert_allclose(poisson_arrivals(50, 4.0, 3) * 4, poisson_arrivals(50, 1.0, 3))


def test_gaps_have_the_mean_and_deviation_of_an_exponential_distribution() -> None:
    gaps = np.diff(poisson_arrivals(20_000, 5.0, 0))
    assert gaps.min() > 0
    # Four standard errors; the seed is fixed.
    assert gaps.mean() == pytest.approx(0.2, abs=4 * 0.2 / np.sqrt(len(gaps)))
    assert gaps.std() == pytest.approx(0.2, rel=0.05)
