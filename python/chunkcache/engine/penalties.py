"""What a request's parameters change in the logits before a token is chosen from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from chunkcache.engine.params import SamplingParams


class LogitsAdjuster:
    """Bias, least length and penalties of one sample.

    What it knows of the generated tokens it counts from their list, so that a sequence that is set
    aside and resumed, or begins as a fork, is treated as any other.
    """

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], end_token_ids: Iterable[int]
    ) -> None:
        """Keep the parameters.

        Args:
            params: of the request.
            prompt_token_ids: its prompt, which repetition_penalty counts too.
            end_token_ids: what may not come before min_tokens.
        """
        self._params = params
        bias = params.logit_bias or {}
        self._biased = np.fromiter(bias.keys(), np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float64, len(bias))
        self._ends = np.fromiter(end_token_ids if params.min_tokens else (), np.int64)
        self._counts_tokens = bool(params.frequency_penalty or params.presence_penalty)
        self._repeats = params.repetition_penalty != 1
        self._seen: set[int] = set(prompt_token_ids) if self._repeats else set()
        self._counts: Counter[int] = Counter()
        self._num_counted = 0

    @property
    def changes_nothing(self) -> bool:
        """Whether every row would come out as it went in."""
        return not (
            len(self._bias) or self._params.min_tokens or self._counts_tokens or self._repeats
        )

    def apply(
        self, logits: npt.NDArray[np.float64], token_ids: Sequence[int]
    ) -> npt.NDArray[np.float64]:
        """Return the logits ``[vocab_size]`` of the next token, which may be the given array.

        Where min_tokens would leave nothing to choose, it is not applied.

        Args:
            logits: a row, which is changed.
            token_ids: what was generated so far; each call has the last one's and further ones.
        """
        logits[self._biased] += self._bias
        self._count(token_ids)
        if self._repeats:
            seen = np.fromiter(self._seen, np.int64, len(self._seen))
            of_seen = logits[seen]
            factor = self._params.repetition_penalty
            logits[seen] = np.where(of_seen > 0, of_seen / factor, of_seen * factor)
        if self._counts_tokens and self._counts:
            size = len(self._counts)
            generated = np.fromiter(self._counts.keys(), np.int64, size)
            counts = np.fromiter(self._counts.values(), np.float64, size)
            logits[generated] -= self._params.frequency_penalty * counts
            logits[generated] -= self._params.presence_penalty
        return self._without_ends(logits) if len(token_ids) < self._params.min_tokens else logits

    def _count(self, token_ids: Sequence[int]) -> None:
        new = token_ids[self._num_counted :]
        self._num_counted = len(token_ids)
        if self._repeats:
            self._seen.update(new)
        if self._counts_tokens:
            self._counts.update(new)

    def _without_ends(self, logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        cut = logits.copy()
        cut[self._ends[self._ends < len(cut)]] = -np.inf
        return cut if np.isfinite(cut.max()) else logits
