"""One timed case: its times, its floors and the ratios that the targets speak of; and curves."""

from __future__ import annotations

from dataclasses import dataclass

from peers import Case
from timing import Timing


@dataclass(frozen=True)
class Row:
    """One timed case; seconds per step."""

    case: Case
    timings: dict[str, Timing]
    product_seconds: float

    @property
    def best_sdpa(self) -> float:
        """The fastest form of torch's attention without sharing."""
        return min(t.median for name, t in self.timings.items() if name.startswith("sdpa"))

    @property
    def floor(self) -> float:
        """The larger of the time to read the bytes and the time to compute the operations."""
        return max(self.timings["read"].median, self.product_seconds)

    def record(self) -> dict[str, object]:
        """For JSON: milliseconds with their quartiles, and the ratios that the targets speak of."""
        ours = self.timings["shared"].median
        return {
            "case": self.case.label(),
            "ms": {
                n: [1e3 * x for x in (t.median, t.low, t.high)] for n, t in self.timings.items()
            },
            "floor_ms": {
                "bytes": 1e3 * self.timings["read"].median,
                "operations": 1e3 * self.product_seconds,
            },
            "over_floor": ours / self.floor,
            "read_bandwidth": self.timings["read"].median / ours,
            "over_best_sdpa": ours / self.best_sdpa,
            "over_two_phase": ours / self.timings["two-phase"].median,
            "speedup_over_unshared": self.timings["unshared"].median / ours,
        }


@dataclass(frozen=True)
class Curve:
    """Cases along one axis, as in the paper's divergence and batch experiments."""

    title: str
    xlabel: str
    points: tuple[int, ...]
    cases: tuple[Case, ...]
