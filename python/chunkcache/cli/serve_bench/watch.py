"""Follows a run while it goes on: progress, and the end of a run that need not go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from chunkcache.cli.serve_bench.workload import TimedRequest


class OverLimitError(Exception):
    """The run's mean normalised latency is over the limit, however fast the rest is served."""


class OutOfTimeError(Exception):
    """The benchmark has no time left for the rest of the run."""


class Watcher:
    """Is told what a server has done, and stops it if that is enough to know."""

    def __init__(
        self,
        workload: Sequence[TimedRequest],
        *,
        limit_ms: float | None = None,
        seconds: float = math.inf,
        on_finished: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with nothing served.

        Args:
            workload: its requests.
            limit_ms: mean normalised latency at which the run is stopped; None for no limit.
            seconds: the run is stopped when so many have passed since its begin.
            on_finished: called for each request that has ended.
        """
        self._unfinished = dict(enumerate(workload))
        self._num_requests = len(workload)
        self._limit = None if limit_ms is None else limit_ms / 1e3
        self._seconds = seconds
        self._on_finished = on_finished
        self._finished_sum = 0.0

    @property
    def num_unfinished(self) -> int:
        """How many requests have not ended."""
        return len(self._unfinished)

    def finished(self, index: int, now: float) -> None:
        """Note that request ``index`` got its last token ``now`` seconds after the begin."""
        request = self._unfinished.pop(index)
        self._finished_sum += (now - request.arrival) / request.num_output_tokens
        self._on_finished()

    def check(self, now: float) -> None:
        """Stop the run if nothing can be won any more.

        Raises:
            OverLimitError: even if all that is unfinished ended now, the mean would be over.
            OutOfTimeError: the run's time is over, and it has not ended.
        """
        if not self._unfinished:
            return
        if now > self._seconds:
            raise OutOfTimeError
        if self._limit is None:
            return
        least = self._finished_sum + sum(
            max(0.0, now - request.arrival) / request.num_output_tokens
            for request in self._unfinished.values()
        )
        if least > self._limit * self._num_requests:
            raise OverLimitError
