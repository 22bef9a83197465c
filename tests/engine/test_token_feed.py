"""Where the tokens of a recorded step come from."""

import numpy as np
import torch

from chunkcache.engine.runner import NewTokens
from chunkcache.engine.token_feed import TokenFeed

CPU = torch.device("cpu")


def new_tokens(ids: list[int], pending: dict[int, int], picked: torch.Tensor | None) -> NewTokens:
    """Return tokens of which ``pending`` says, by row, which pick they are."""
    rows, picks = np.array(list(pending.items()), dtype=np.int64).reshape(-1, 2).T
    return NewTokens(np.array(ids, dtype=np.int64), CPU, rows, picks, picked)


def test_known_tokens_are_taken_as_they_are() -> None:
    feed = TokenFeed(4, CPU)
    feed.load(new_tokens([5, 0, 7], {}, None))
    assert feed.token_ids(3).tolist() == [5, 0, 7]


def test_picks_of_the_recorded_step_before_are_found_where_they_are() -> None:
    feed = TokenFeed(4, CPU)
    feed.picked.copy_(torch.tensor([10, 11, 12, 13]))
    feed.load(new_tokens([0, 6, 0], {0: 2, 2: 0}, feed.picked[:3]))
    assert feed.token_ids(3).tolist() == [12, 6, 10]
    assert feed.picked.tolist() == [10, 11, 12, 13]


def test_other_picks_are_copied() -> None:
    feed = TokenFeed(4, CPU)
    picked = torch.arange(20, 30)
    feed.load(new_tokens([0, 6, 0], {0: 9, 2: 3}, picked))
    assert feed.token_ids(3).tolist() == [29, 6, 23]


def test_a_pick_that_failed_gives_any_token() -> None:
    feed = TokenFeed(2, CPU)
    feed.picked.fill_(-1)
    feed.load(new_tokens([0, 0], {0: 0, 1: 1}, feed.picked))
    assert feed.token_ids(2).tolist() == [0, 0]


def test_what_is_loaded_is_what_the_plain_runner_gets() -> None:
    tokens = new_tokens([4, 0, 8], {1: 1}, torch.tensor([3, 9]))
    feed = TokenFeed(3, CPU)
    feed.load(tokens)
    assert tokens.on_device().tolist() == feed.token_ids(3).tolist() == [4, 9, 8]
