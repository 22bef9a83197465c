"""The distribution that temperature, min_p, top_k and top_p make of logits, and draws from it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from chunkcache.engine.params import SamplingParams

# Different logits over anything lower are as far apart for exp, but may overflow.
_LOWEST_TEMPERATURE = 1e-260


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


def sample(logits: npt.NDArray[np.float64], params: SamplingParams, draw: float) -> int:
    """Draw a token from the logits of one row.

    The kept tokens stand in the order of their ids, and the draw picks the one in whose part of
    the cumulative distribution it falls.

    Args:
        logits: ``[vocab_size]``.
        params: temperature, min_p, top_k and top_p; the temperature is above 0.
        draw: a number in [0, 1).
    """
    cumulative = np.cumsum(distribution(logits, params))
    # The last sum may miss 1 by rounding: the draw scales with it, and stays below it.
    total = cumulative[-1]
    return int(np.searchsorted(cumulative, min(draw * total, np.nextafter(total, 0)), side="right"))


def distribution(
    logits: npt.NDArray[np.float64], params: SamplingParams
) -> npt.NDArray[np.float64]:
    """Return the probabilities ``[vocab_size]`` that ``params`` gives to the tokens of one row.

    top_k is applied to what min_p leaves, and top_p to what top_k leaves, in shares of that; both
    count from the most probable token on; of equal ones the lower id comes first.
    """
    temperature = max(params.temperature, _LOWEST_TEMPERATURE)
    weights = np.exp((logits - logits.max()) / temperature)
    weights[weights < params.min_p] = 0
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
