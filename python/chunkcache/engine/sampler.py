"""Picks the next token of each sequence from its logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from chunkcache.engine.params import SamplingParams


class Draws:
    """The random numbers of one sample: they depend on its seed and index alone.

    One number is taken for each token, so that a sequence that is set aside and resumed draws on
    as if nothing had happened.
    """

    def __init__(self, seed: int, index: int) -> None:
        """Seed the generator with ``(seed, index)``."""
        self._generator = np.random.default_rng([seed, index])

    def next(self) -> float:
        """Return the next number, uniform in [0, 1)."""
        return float(self._generator.random())


def greedy(logits: torch.Tensor) -> list[int]:
    """Return the best token of each row of ``logits`` ``[rows, vocab_size]``."""
    best: list[int] = logits.argmax(dim=-1).tolist()
    return best


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float]
) -> list[int]:
    """Draw a token for each row of ``logits`` ``[rows, vocab_size]``.

    The kept tokens stand in the order of their ids, and the draw picks the one in whose part of
    the cumulative distribution it falls. Rows do not influence each other.

    Args:
        logits: any float dtype; computed in float64.
        params: temperature, top_k and top_p of each row; the temperature is above 0.
        draws: a number in [0, 1) for each row.
    """
    rows = logits.to(device="cpu", dtype=torch.float64).numpy()
    return [
        _sample_row(row, row_params, draw)
        for row, row_params, draw in zip(rows, params, draws, strict=True)
    ]


def distribution(
    logits: npt.NDArray[np.float64], params: SamplingParams
) -> npt.NDArray[np.float64]:
    """Return the probabilities ``[vocab_size]`` that ``params`` gives to the tokens of one row.

    top_p is applied to what top_k leaves, and counts from the most probable token on; of equal
    ones the lower id comes first.
    """
    weights = np.exp((logits - logits.max()) / params.temperature)
    if 0 < params.top_k < len(weights) or params.top_p < 1:
        kept = _most_probable(weights, params)
        cut = np.zeros_like(weights)
        cut[kept] = weights[kept]
        weights = cut
    probabilities: npt.NDArray[np.float64] = weights / weights.sum()
    return probabilities


def _most_probable(
    weights: npt.NDArray[np.float64], params: SamplingParams
) -> npt.NDArray[np.intp]:
    """Return the ids that top_k and top_p keep, the most probable first.

    Sorting the whole vocabulary would cost more than a small model's step, so what surely falls
    out is dropped before.
    """
    size, total = len(weights), weights.sum()
    num_kept = params.top_k if 0 < params.top_k < size else size
    if num_kept < size:
        least = np.partition(weights, size - num_kept)[size - num_kept]
    else:
        # All tokens below this together weigh less than what top_p leaves out.
        least = (1 - params.top_p) * total / size
    candidates = np.flatnonzero(weights >= least)
    kept = candidates[np.argsort(-weights[candidates], kind="stable")][:num_kept]
    if num_kept < size:
        total = weights[kept].sum()
    before = np.cumsum(weights[kept]) - weights[kept]
    return kept[before < params.top_p * total] if params.top_p < 1 else kept


def _sample_row(logits: npt.NDArray[np.float64], params: SamplingParams, draw: float) -> int:
    cumulative = np.cumsum(distribution(logits, params))
    # The last sum may miss 1 by rounding: the draw scales with it, and stays below it.
    total = cumulative[-1]
    return int(np.searchsorted(cumulative, min(draw * total, np.nextafter(total, 0)), side="right"))
