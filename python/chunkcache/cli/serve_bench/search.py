"""The highest request rate at which a latency limit holds, by bisection."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from chunkcache.cli.serve_bench.metrics import Summary

# From a start that was measured the answer is near: the first steps are of this factor, later ones
# double.
_FIRST_FACTOR = 1.25
_LARGEST_FACTOR = 2.0


@dataclass(frozen=True)
class Trial:
    """One rate that was tried.

    Attributes:
        rps: requests per second.
        summary: the figures there; None if it was certain to be over the limit before the run's
            end.
    """

    rps: float
    summary: Summary | None

    @property
    def latency_ms(self) -> float | None:
        """The normalised latency there."""
        return None if self.summary is None else self.summary.normalised_latency_ms


@dataclass(frozen=True)
class SearchResult:
    """What a search has found: the limit lies between `rps` and `missed_rps`.

    Attributes:
        rps: the highest rate known to meet the limit; 0 if none is.
        missed_rps: the lowest rate known not to; None if none is, so that ``rps`` is a lower bound.
        trials: in the order in which they were made.
        is_highest: whether ``rps`` is the highest rate that can be kept up at all.
    """

    rps: float
    missed_rps: float | None
    trials: list[Trial]
    is_highest: bool = False

    def record(self) -> dict[str, Any]:
        """Return it as a dictionary that JSON can hold."""
        return asdict(self)


class RateSearch:
    """Finds the highest rate whose latency is within a limit, one trial after another.

    The rate is raised, or lowered, from its start until the limit lies between two rates; then it
    is bisected on a logarithmic scale until they are within ``tolerance`` of each other. Whoever
    makes the trials may stop at any time, and has the two rates then.
    """

    def __init__(
        self,
        limit_ms: float,
        start: float,
        *,
        tolerance: float,
        max_trials: int,
        highest: float = math.inf,
    ) -> None:
        """Begin without a trial.

        Args:
            limit_ms: normalised latency in milliseconds, which itself is allowed.
            start: the first rate; few trials are needed if it is near the answer.
            tolerance: the two last rates differ by no more than this share.
            max_trials: trials at most.
            highest: no rate above this one is tried. A short run may be within the limit although
                requests come faster than they are served.
        """
        self._limit_ms = limit_ms
        self._highest = highest
        self._tolerance = tolerance
        self._max_trials = max_trials
        self._rate = start
        self._factor = _FIRST_FACTOR
        self._met = 0.0
        self._missed = math.inf
        self._trials: list[Trial] = []

    @property
    def next_rate(self) -> float | None:
        """The rate to try next; None if the search is over."""
        found = self._missed <= self._met * (1 + self._tolerance) or self._met >= self._highest
        return None if found or len(self._trials) >= self._max_trials else self._rate

    @property
    def result(self) -> SearchResult:
        """What is known after the trials so far."""
        missed = self._missed if math.isfinite(self._missed) else None
        return SearchResult(self._met, missed, list(self._trials), self._met >= self._highest)

    def note(self, summary: Summary | None) -> None:
        """Take in the figures at `next_rate`: None if the latency is surely over the limit."""
        trial = Trial(self._rate, summary)
        self._trials.append(trial)
        self._bound(trial.rps, trial.latency_ms)
        if self._met and math.isfinite(self._missed):
            self._rate = math.sqrt(self._met * self._missed)
            return
        rate = self._rate * self._factor if self._met else self._rate / self._factor
        self._rate = min(rate, self._highest)
        self._factor = min(_LARGEST_FACTOR, self._factor**2)

    def learn(self, rps: float, latency_ms: float) -> None:
        """Take in what is known without a trial, before the first one."""
        self._bound(rps, latency_ms)
        if self._rate <= self._met:
            self._rate = min(self._met * self._factor, self._highest)
        elif self._rate >= self._missed:
            self._rate = self._missed / self._factor

    def _bound(self, rps: float, latency_ms: float | None) -> None:
        if latency_ms is not None and latency_ms <= self._limit_ms:
            self._met = max(self._met, rps)
        else:
            self._missed = min(self._missed, rps)
