"""The time that the benchmark may take, and how it is divided among what is left to do."""

from __future__ import annotations

import math

from chunkcache.cli.serve_bench.clock import Clock


class TimeBudget:
    """So many seconds from now on, for parts that come one after another.

    A part gets its share of what is left when it begins, so that what one spares the later ones
    have.
    """

    def __init__(self, clock: Clock, seconds: float | None) -> None:
        """Begin now; without ``seconds`` there is no end."""
        self._clock = clock
        self._end = math.inf if seconds is None else clock.now() + seconds
        self._part_end = self._end
        self._weight = 0.0

    @property
    def left(self) -> float:
        """Seconds that are left of all; infinite without an end."""
        return self._end - self._clock.now()

    @property
    def left_of_part(self) -> float:
        """Seconds that are left of the part that began last."""
        return self._part_end - self._clock.now()

    def expect(self, weight: float) -> None:
        """Note a part that is to come, and how long it takes in relation to others."""
        self._weight += weight

    def begin(self, weight: float) -> None:
        """Begin a part that was expected."""
        if math.isfinite(self._end):
            self._part_end = self._clock.now() + max(0.0, self.left) * weight / self._weight
        self._weight -= weight
