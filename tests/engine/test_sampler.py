"""How tokens are picked from logits."""

import numpy as np
import pytest

from chunkcache.engine import SamplingParams
from chunkcache.engine.sampler import Draws, distribution, sample


def _logits(probabilities: list[float]) -> np.ndarray:
    return np.log(np.array(probabilities))


def test_the_distribution_is_the_softmax() -> None:
    probabilities = [0.1, 0.6, 0.3]
    result = distribution(_logits(probabilities), SamplingParams(temperature=1.0))
    np.testing.assert_allclose(result, probabilities)


def test_a_temperature_divides_the_logits() -> None:
    result = distribution(_logits([0.2, 0.8]), SamplingParams(temperature=0.5))
    np.testing.assert_allclose(result, np.array([0.04, 0.64]) / 0.68)


def test_top_k_keeps_the_most_probable() -> None:
    result = distribution(_logits([0.1, 0.6, 0.3]), SamplingParams(temperature=1.0, top_k=2))
    np.testing.assert_allclose(result, [0, 2 / 3, 1 / 3])


def test_top_k_keeps_no_more_than_k_equal_tokens() -> None:
    result = distribution(_logits([0.25] * 4), SamplingParams(temperature=1.0, top_k=3))
    np.testing.assert_allclose(result, [1 / 3, 1 / 3, 1 / 3, 0])


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.59, [1]), (0.61, [1, 2]), (0.91, [0, 1, 2]), (1.0, [0, 1, 2])]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p, kept) -> None:
    result = distribution(_logits([0.1, 0.6, 0.3]), SamplingParams(temperature=1.0, top_p=top_p))
    assert np.flatnonzero(result).tolist() == kept


def test_top_p_counts_what_top_k_leaves() -> None:
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.65)
    result = distribution(_logits([0.2, 0.5, 0.3]), params)
    assert np.flatnonzero(result).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.1, [0, 1, 2]), (0.3, [1, 2]), (0.4, [1, 2]), (0.6, [1]), (1.0, [1])]
)
def test_min_p_keeps_what_is_near_the_most_probable(min_p, kept) -> None:
    result = distribution(_logits([0.1, 0.6, 0.3]), SamplingParams(temperature=1.0, min_p=min_p))
    assert np.flatnonzero(result).tolist() == kept


@pytest.mark.parametrize(("draw", "token"), [(0.0, 0), (0.09, 0), (0.11, 1), (0.69, 1), (0.71, 2)])
def test_a_draw_falls_into_the_part_of_its_token(draw, token) -> None:
    logits = _logits([0.1, 0.6, 0.3])
    assert sample(logits, SamplingParams(temperature=1.0), draw) == token


@pytest.mark.parametrize("draw", [0.0, np.nextafter(1.0, 0)])
def test_a_draw_never_picks_what_was_cut_off(draw) -> None:
    logits = _logits([0.2, 0.5, 0.3])
    assert sample(logits, SamplingParams(temperature=1.0, top_k=1), draw) == 1


def test_a_very_low_temperature_takes_the_best() -> None:
    logits = np.array([1.0, 1.5, -3.0])
    assert sample(logits, SamplingParams(temperature=1e-6), 0.999) == 1


def test_frequencies_follow_the_probabilities() -> None:
    draws = Draws(3, 0)
    logits = _logits([0.1, 0.6, 0.3])
    params = SamplingParams(temperature=1.0)
    tokens = [sample(logits, params, draws.next()) for _ in range(4000)]
    np.testing.assert_allclose(np.bincount(tokens) / 4000, [0.1, 0.6, 0.3], atol=0.03)


def test_equal_seeds_give_equal_draws() -> None:
    assert [Draws(5, 1).next() for _ in range(2)] == [Draws(5, 1).next()] * 2


@pytest.mark.parametrize("other", [(5, 2), (6, 1)])
def test_another_seed_or_sample_gives_other_draws(other) -> None:
    assert Draws(5, 1).next() != Draws(*other).next()


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 2.3e-308, 1e-300])
@pytest.mark.parametrize("cut", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_the_lowest_temperatures_take_the_best(temperature, cut) -> None:
    logits = np.array([1.0, 40.0, np.float32(40.00001), -3e38, -np.inf])
    result = distribution(logits, SamplingParams(temperature=temperature, **cut))
    assert result.tolist() == [0, 0, 1, 0, 0]
