"""Log-probabilities of tokens, as vLLM gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

ALL = -1
"""Number of tokens that stands for the whole vocabulary."""

# Bounds the memory of the float64 copy.
_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Logprob:
    """What the model thinks of one token.

    Attributes:
        logprob: natural logarithm of its probability by the model's own logits: before
            temperature, penalties, bias and any other change (vLLM's ``raw_logprobs``).
        rank: 1 for the most probable token; of equal ones the lower id comes first.
        decoded_token: the token's text alone, None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


def logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int], num_tokens: int
) -> list[dict[int, Logprob]]:
    """Return for each row the log-probabilities of its token and of the most probable tokens.

    Args:
        logits: the model's, ``[rows, vocab_size]``, any float dtype; computed in float64.
        token_ids: the token of each row; it comes first in its row's dict.
        num_tokens: how many of the most probable follow, in their order; `ALL` for all.
    """
    result: list[dict[int, Logprob]] = []
    for begin in range(0, len(token_ids), _ROWS_AT_ONCE):
        block = slice(begin, begin + _ROWS_AT_ONCE)
        result += _block_logprobs(logits[block].double(), token_ids[block], num_tokens)
    return result


class PromptLogprobs:
    """The log-probabilities of a prompt's tokens, collected as its rows are computed."""

    def __init__(self, prompt_token_ids: Sequence[int], num_tokens: int) -> None:
        """Begin before the prompt.

        Args:
            prompt_token_ids: the prompt.
            num_tokens: how many of the most probable tokens to tell of, as in `logprobs_of`.
        """
        self._prompt = prompt_token_ids
        self._num_tokens = num_tokens
        #: For each token of the prompt so far, None for the first, which nothing comes before.
        self.entries: list[dict[int, Logprob] | None] = [None]

    @property
    def next_position(self) -> int:
        """The first position whose logits are needed yet."""
        return len(self.entries) - 1

    @property
    def is_complete(self) -> bool:
        """Whether all are there."""
        return len(self.entries) == len(self._prompt)

    def wanted(self, begin: int, end: int) -> range:
        """Return the positions in ``[begin, end)`` whose logits are needed."""
        return range(max(begin, self.next_position), min(end, len(self._prompt) - 1))

    def add(self, logits: torch.Tensor, tokenizer: Any | None) -> None:
        """Take the logits ``[positions, vocab_size]`` of the next needed positions."""
        begin = len(self.entries)
        token_ids = self._prompt[begin : begin + len(logits)]
        for entry in logprobs_of(logits, token_ids, self._num_tokens):
            self.entries.append(with_text(entry, tokenizer))


def with_text(logprobs: dict[int, Logprob], tokenizer: Any | None) -> dict[int, Logprob]:
    """Return the same with the tokens' texts, if there is a tokenizer."""
    if tokenizer is None:
        return logprobs
    return {
        token_id: replace(entry, decoded_token=tokenizer.decode([token_id]))
        for token_id, entry in logprobs.items()
    }


def _block_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_tokens: int
) -> list[dict[int, Logprob]]:
    size = logits.shape[-1]
    count = size if num_tokens == ALL else min(num_tokens, size)
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logits.gather(1, ids)
    before = torch.arange(size, device=logits.device) < ids
    ranks = ((logits > own) | ((logits == own) & before)).sum(dim=1) + 1
    norms = logits.logsumexp(dim=1)
    values = (own[:, 0] - norms).tolist()
    result = [
        {token_id: Logprob(value, rank)}
        for token_id, value, rank in zip(token_ids, values, ranks.tolist(), strict=True)
    ]
    for row, entry in enumerate(result if count else ()):
        best = _best(logits[row], count)
        for position, (token_id, value) in enumerate(
            zip(best.tolist(), (logits[row, best] - norms[row]).tolist(), strict=True)
        ):
            entry.setdefault(token_id, Logprob(value, position + 1))
    return result


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ids of the ``count`` highest values, the highest first, then the lower id."""
    least = values.topk(count).values[-1]
    candidates = (values >= least).nonzero()[:, 0]
    order = values[candidates].sort(descending=True, stable=True).indices
    return candidates[order[:count]]
