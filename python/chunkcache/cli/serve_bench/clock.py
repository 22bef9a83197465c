"""The time that a workload runs on."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What arrivals are kept by and tokens are stamped with."""

    def now(self) -> float:
        """Return the time, in seconds."""

    def sleep_until(self, moment: float) -> None:
        """Return when ``moment`` has come."""

    def tick(self) -> None:
        """Note that the server has done a step."""


class WallClock:
    """Real time, that of `time.perf_counter`."""

    def now(self) -> float:
        """Return the time, in seconds."""
        return time.perf_counter()

    def sleep_until(self, moment: float) -> None:
        """Return when ``moment`` has come."""
        time.sleep(max(0.0, moment - self.now()))

    def tick(self) -> None:
        """Do nothing: a real step has taken its time."""


class VirtualClock:
    """A time in which every step takes equally long, and nothing else takes any.

    With it a run depends on its schedule alone, so that it can be computed by hand and repeated.
    """

    def __init__(self, step_seconds: float) -> None:
        """Begin at 0."""
        self._now = 0.0
        self._step_seconds = step_seconds

    def now(self) -> float:
        """Return the time, in seconds."""
        return self._now

    def sleep_until(self, moment: float) -> None:
        """Let the time be ``moment``, if it is not later."""
        self._now = max(self._now, moment)

    def tick(self) -> None:
        """Let the time of a step pass."""
        self._now += self._step_seconds
