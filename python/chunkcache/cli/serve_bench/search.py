"""The highest request rate at which a latency limit holds, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """One rate that was tried.

    Attributes:
        rps: requests per second.
        latency_ms: the normalised latency there; None if it was certain to be over the limit
            before the run's end.
    """

    rps: float
    latency_ms: float | None


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    Attributes:
        rps: the highest rate tried that met the limit; 0 if none did.
        is_limit: whether a higher rate was tried that did not; else ``rps`` is a lower bound.
        trials: in the order in which they were made.
    """

    rps: float
    is_limit: bool
    trials: list[Trial]


def highest_rate(
    latency_at: Callable[[float], float | None],
    limit_ms: float,
    start: float,
    *,
    tolerance: float,
    max_trials: int,
) -> SearchResult:
    """Find the highest rate whose latency is within a limit.

    The rate is doubled, or halved, from ``start`` until the limit lies between two rates; then it
    is bisected on a logarithmic scale until they are within ``tolerance`` of each other.

    Args:
        latency_at: runs the workload at a rate and returns its normalised latency in
            milliseconds, None if that is surely over the limit. It should not fall with the rate.
        limit_ms: the limit, which itself is allowed.
        start: the first rate.
        tolerance: the two last rates differ by no more than this share.
        max_trials: runs to make at most; the search then ends with what it has.
    """
    trials: list[Trial] = []
    met, missed, rate = 0.0, math.inf, start
    while len(trials) < max_trials and missed > met * (1 + tolerance):
        latency = latency_at(rate)
        trials.append(Trial(rate, latency))
        if latency is not None and latency <= limit_ms:
            met = rate
        else:
            missed = rate
        if math.isinf(missed):
            rate = met * 2
        elif met == 0:
            rate = missed / 2
        else:
            rate = math.sqrt(met * missed)
    return SearchResult(met, math.isfinite(missed), trials)
