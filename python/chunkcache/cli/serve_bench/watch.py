"""Follows a run while it goes on: progress, and the end of a run that cannot succeed any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chunkcache.cli.serve_bench.workload import TimedRequest


class OverLimitError(Exception):
    """The run's mean normalised latency is over the limit, however fast the rest is served."""


class Watcher:
    """Is told what a server has done, and stops it if that is enough to know."""

    def __init__(
        self,
        workload: Sequence[TimedRequest],
        *,
        limit_ms: float | None = None,
        on_finished: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with nothing served.

        Args:
            workload: its requests.
            limit_ms: mean normalised latency at which the run is stopped; None for no limit.
            on_finished: called for each request that has ended.
        """
        self._unfinished = dict(enumerate(workload))
        self._num_requests = len(workload)
        self._limit = None if limit_ms is None else limit_ms / 1e3
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
        """Stop the run if the limit is lost.

        Raises:
            OverLimitError: even if all that is unfinished ended now, the mean would be over.
        """
        if self._limit is None:
            return
        least = self._finished_sum + sum(
            max(0.0, now - request.arrival) / request.num_output_tokens
            for request in self._unfinished.values()
        )
        if least > self._limit * self._num_requests:
            raise OverLimitError
