"""Bias, least length and penalties, against transformers' processors and plain numpy."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from chunkcache.engine import SamplingParams
from chunkcache.engine.penalties import LogitsAdjuster
from chunkcache.engine.sampler import distribution

PROMPT = [3, 5, 5, 8]
GENERATED = [1, 5, 1, 1, 9]
ENDS = (2, 7)


def _logits(size: int = 20, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=3, size=size)


def _adjusted(logits: np.ndarray, generated: list[int] = GENERATED, **params) -> np.ndarray:
    adjuster = LogitsAdjuster(SamplingParams(**params), PROMPT, ENDS)
    return adjuster.apply(logits.copy(), generated)


def test_presence_counts_a_generated_token_once() -> None:
    expected = _logits()
    expected[[1, 5, 9]] -= 0.5
    np.testing.assert_allclose(_adjusted(_logits(), presence_penalty=0.5), expected)


def test_frequency_counts_a_generated_token_each_time() -> None:
    expected = _logits()
    expected[[1, 5, 9]] -= np.array([3, 1, 1]) * -0.5
    np.testing.assert_allclose(_adjusted(_logits(), frequency_penalty=-0.5), expected)


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_is_that_of_transformers_over_prompt_and_generated(penalty) -> None:
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([PROMPT + GENERATED]), torch.from_numpy(_logits())[None])
    result = _adjusted(_logits(), repetition_penalty=penalty)
    np.testing.assert_allclose(result, expected[0].numpy())


def test_a_bias_is_added() -> None:
    expected = _logits()
    expected[4] += 7.5
    expected[0] -= 100
    np.testing.assert_allclose(_adjusted(_logits(), logit_bias={4: 7.5, "0": -100}), expected)


@pytest.mark.parametrize(("num_generated", "banned"), [(0, True), (2, True), (3, False)])
def test_ends_are_banned_before_min_tokens(num_generated, banned) -> None:
    result = _adjusted(_logits(), [1] * num_generated, min_tokens=3)
    assert np.flatnonzero(np.isinf(result)).tolist() == (list(ENDS) if banned else [])


def test_min_tokens_gives_way_where_nothing_else_is_left() -> None:
    logits = np.full(20, -np.inf)
    logits[7] = 1
    np.testing.assert_array_equal(_adjusted(logits, [], min_tokens=3), logits)


def test_nothing_asked_changes_nothing() -> None:
    assert LogitsAdjuster(SamplingParams(temperature=1.0), PROMPT, ENDS).changes_nothing


@pytest.mark.parametrize("seed", range(5))
def test_all_of_them_apply_in_the_documented_order(seed) -> None:
    params = SamplingParams(
        temperature=0.7,
        min_p=0.02,
        top_k=9,
        top_p=0.9,
        repetition_penalty=1.4,
        frequency_penalty=0.3,
        presence_penalty=0.6,
        logit_bias={5: 3.0, 8: -2.0},
        min_tokens=6,
    )
    logits = _logits(seed=seed)
    ids = torch.tensor([PROMPT + GENERATED])
    expected = SequenceBiasLogitsProcessor([[[5], 3.0], [[8], -2.0]])(
        ids, torch.from_numpy(logits)[None]
    )
    expected = RepetitionPenaltyLogitsProcessor(1.4)(ids, expected)
    counts = torch.bincount(torch.tensor(GENERATED), minlength=20)
    expected = expected - 0.3 * counts - 0.6 * (counts > 0)
    expected[:, list(ENDS)] = -torch.inf
    warpers = LogitsProcessorList(
        [
            TemperatureLogitsWarper(0.7),
            MinPLogitsWarper(0.02),
            TopKLogitsWarper(9),
            TopPLogitsWarper(0.9),
        ]
    )
    expected = warpers(ids, expected).softmax(dim=-1)[0].numpy()
    adjusted = LogitsAdjuster(params, PROMPT, ENDS).apply(logits.copy(), GENERATED)
    np.testing.assert_allclose(distribution(adjusted, params), expected, atol=1e-12)


def test_counting_goes_on_from_call_to_call() -> None:
    params = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2)
    growing = LogitsAdjuster(params, PROMPT, ENDS)
    for length in range(len(GENERATED) + 1):
        fresh = LogitsAdjuster(params, PROMPT, ENDS)
        np.testing.assert_array_equal(
            growing.apply(_logits(), GENERATED[:length]), fresh.apply(_logits(), GENERATED[:length])
        )
