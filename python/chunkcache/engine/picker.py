"""Picks a token for each sample of a step, from the step's logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from chunkcache.engine import sampler
from chunkcache.engine.device import to_device
from chunkcache.engine.device_sampler import sample_rows
from chunkcache.engine.guided import Grammar
from chunkcache.engine.logprobs import Logprob, logprobs_of
from chunkcache.engine.params import SamplingParams
from chunkcache.engine.penalties import LogitsAdjuster
from chunkcache.engine.sampler import Draws
from chunkcache.errors import ChunkCacheError

NO_TOKEN = -1
"""Stands where the logits of a row are not finite, so that no token can be told."""


class SampleState:
    """What the choice of one sample's tokens depends on, beside the logits.

    It belongs to the picker, which adds each token that it picks. All of it follows from the
    request and those tokens: what else is in the batch, and whether the sequence was set aside
    meanwhile, makes no difference.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        index: int,
        prompt_token_ids: Sequence[int],
        end_token_ids: Iterable[int],
        grammar: Grammar | None = None,
    ) -> None:
        """Begin with nothing generated.

        Args:
            params: of the request.
            seed: of the request.
            index: number of the sample.
            prompt_token_ids: the request's prompt.
            end_token_ids: what may not come before ``params.min_tokens``.
            grammar: what the text has to keep to.
        """
        self.params = params
        self.token_ids: list[int] = []
        self.draws = None if params.greedy else Draws(seed, index)
        self._grammar = None if grammar is None else grammar.begin()
        self._adjuster = LogitsAdjuster(params, prompt_token_ids, end_token_ids)
        is_plain = (
            self._grammar is None
            and self._adjuster.changes_nothing
            and self.params.logprobs is None
        )
        #: Whether the token is that of the highest logit, and nothing is told of the others.
        self.takes_best = is_plain and self.draws is None
        #: Whether the token follows from the logits and the next draw, and is all that is told: a
        #: device can pick it, and the sample need not know which it was.
        self.only_draws = is_plain and self.draws is not None

    @property
    def is_complete(self) -> bool:
        """Whether the grammar lets nothing follow."""
        return self._grammar is not None and self._grammar.is_complete

    def pick(self, logits: npt.NDArray[np.float64]) -> int:
        """Pick the next token.

        Args:
            logits: the model's, ``[vocab_size]``; they are changed.

        Raises:
            ChunkCacheError: there is no token to choose.
        """
        if not np.isfinite(logits.max()):
            raise ChunkCacheError("the model's logits are not finite")
        # A token after the last one is thrown away.
        grammar = None if self.is_complete else self._grammar
        if grammar is not None:
            grammar.forbid(logits)
        logits = self._adjuster.apply(logits, self.token_ids)
        if not np.isfinite(logits.max()):
            raise ChunkCacheError("guided output: the model has no token that may come next")
        if self.draws is None:
            token = int(logits.argmax())
        else:
            token = sampler.sample(logits, self.params, self.draws.next())
        self.token_ids.append(token)
        if grammar is not None:
            grammar.accept(token)
        return token


class Pick(NamedTuple):
    """A token to pick for ``state`` from row ``row`` of the step's logits."""

    row: int
    state: SampleState


@dataclass(slots=True)
class Picked:
    """What was picked.

    Attributes:
        tokens: int64 ``[picks]``, on the logits' device; `NO_TOKEN` where the logits are not
            finite, arbitrary where there is another error.
        logprobs: for each pick its log-probabilities, None if they are not wanted.
        errors: the picks that failed, and why; the others are not concerned. Those of `NO_TOKEN`
            come with `failed`, when the tokens are on the host.
        completes: the picks after which the grammar of a guided text lets nothing follow.
    """

    tokens: torch.Tensor
    logprobs: list[dict[int, Logprob] | None]
    errors: dict[int, Exception] = field(default_factory=dict)
    completes: set[int] = field(default_factory=set)

    def failed(self, tokens: Sequence[int]) -> dict[int, Exception]:
        """Return the picks that failed, by their index, given ``tokens`` on the host."""
        if NO_TOKEN not in tokens:
            return self.errors
        not_finite = (i for i, token in enumerate(tokens) if token == NO_TOKEN)
        found = {i: ChunkCacheError("the model's logits are not finite") for i in not_finite}
        return {**found, **self.errors}


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return the best token of each row, int64; `NO_TOKEN` where its logit is not finite."""
    best, tokens = logits.max(dim=-1)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


class TokenPicker:
    """Picks the tokens of a step."""

    def __init__(self, best_of: Callable[[torch.Tensor], torch.Tensor] = best_tokens) -> None:
        """Keep what gives the best tokens of logits; the runner may have them already.

        Args:
            best_of: computes what `best_tokens` does. The picker may write into what it returns.
        """
        self._best_of = best_of

    def pick(self, logits: torch.Tensor, picks: Sequence[Pick]) -> Picked:
        """Pick a token for each of ``picks``; several may use one row.

        Args:
            logits: ``[rows, vocab_size]``, any float dtype. What is not simply the best token is
                computed in float64 on the host.
            picks: the rows, and whose token it is.
        """
        tokens = self._best_of(logits)
        rows = np.array([pick.row for pick in picks], dtype=np.int64)
        if not np.array_equal(rows, np.arange(len(tokens))):
            tokens = tokens[to_device(rows, logits.device)]
        picked = Picked(tokens, [None] * len(picks))
        drawn: list[int] = []
        on_host: list[int] = []
        for i, pick in enumerate(picks):
            if not pick.state.takes_best:
                (drawn if logits.is_cuda and pick.state.only_draws else on_host).append(i)
        if drawn:
            self._draw(logits, [picks[i] for i in drawn], drawn, picked.tokens)
        if not on_host:
            # Nothing here waits for the device.
            return picked
        values = logits[to_device(rows[on_host], logits.device)].to("cpu", torch.float64).numpy()
        chosen: dict[int, int] = {}
        for i, row in zip(on_host, values, strict=True):
            state = picks[i].state
            try:
                token = state.pick(row)
                chosen[i] = token
                if state.is_complete:
                    picked.completes.add(i)
                if (number := state.params.logprobs) is not None:
                    own_row = logits[picks[i].row : picks[i].row + 1]
                    picked.logprobs[i] = logprobs_of(own_row, [token], number)[0]
            except Exception as error:  # Fails this pick alone, whatever went wrong in it.
                picked.errors[i] = error
        index, new = np.array(list(chosen.items()), dtype=np.int64).reshape(-1, 2).T
        picked.tokens[to_device(index, logits.device)] = to_device(new, logits.device)
        return picked

    @staticmethod
    def _draw(
        logits: torch.Tensor, picks: Sequence[Pick], indices: Sequence[int], tokens: torch.Tensor
    ) -> None:
        """Draw on the device, into ``tokens`` at ``indices``; `NO_TOKEN` stays where it stands."""
        rows = to_device(np.array([pick.row for pick in picks], dtype=np.int64), logits.device)
        draws = [pick.state.draws.next() for pick in picks if pick.state.draws is not None]
        drawn = sample_rows(logits[rows], [pick.state.params for pick in picks], draws)
        at = to_device(np.array(indices, dtype=np.int64), logits.device)
        tokens[at] = torch.where(tokens[at] == NO_TOKEN, NO_TOKEN, drawn)
