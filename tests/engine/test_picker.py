"""Picking the tokens of a step."""

import numpy as np
import pytest
import torch

from chunkcache import ChunkCacheError
from chunkcache.engine import SamplingParams
from chunkcache.engine.picker import Pick, SampleState, TokenPicker


def _state(index: int = 0, **params) -> SampleState:
    return SampleState(SamplingParams(**params), 5, index, [1, 2], ())


def _tokens(logits: torch.Tensor, picks: list[Pick]) -> list[int]:
    return TokenPicker().pick(logits, picks).tokens.tolist()


def test_the_best_token_of_each_row_is_taken() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert _tokens(logits, [Pick(1, _state()), Pick(0, _state())]) == [0, 1]


def test_penalties_count_for_the_best_token_too() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0]])
    state = _state(presence_penalty=1.5)
    assert [_tokens(logits, [Pick(0, state)])[0] for _ in range(3)] == [1, 2, 1]


def test_draws_do_not_depend_on_the_other_picks() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    alone, together = _state(temperature=1.0), _state(temperature=1.0)
    others = [_state(1, temperature=2.0), _state(2, presence_penalty=1.0)]
    for _ in range(10):
        picks = [Pick(0, others[0]), Pick(1, together), Pick(2, others[1]), Pick(1, _state())]
        assert _tokens(logits, picks)[1] == _tokens(logits, [Pick(1, alone)])[0]


def test_samples_of_one_row_do_not_see_each_others_penalties() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0]])
    states = [_state(i, presence_penalty=1.5) for i in range(2)]
    assert _tokens(logits, [Pick(0, state) for state in states]) == [1, 1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"presence_penalty": 1.0}])
def test_logits_that_are_not_finite_fail_their_pick_alone(params, bad) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [bad, bad, bad], [5.0, 3.0, 1.0]])
    picks = [Pick(row, _state(**params)) for row in range(3)]
    picked = TokenPicker().pick(logits, picks)
    errors = picked.failed(picked.tokens.tolist())
    assert list(errors) == [1]
    assert isinstance(errors[1], ChunkCacheError)


def test_logprobs_are_those_before_any_change() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0]])
    state = _state(temperature=0.1, logit_bias={0: 100}, logprobs=1)
    picked = TokenPicker().pick(logits, [Pick(0, state)])
    (entry,) = picked.logprobs
    expected = logits[0].double().log_softmax(dim=0).numpy()
    assert picked.tokens.tolist() == [0]
    assert [(token, value.rank) for token, value in entry.items()] == [(0, 3), (1, 1)]
    np.testing.assert_allclose([value.logprob for value in entry.values()], expected[[0, 1]])
