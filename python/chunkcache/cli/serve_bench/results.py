"""What a benchmark has found, and how it is combined."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from chunkcache.cli.serve_bench.compare import Comparison
from chunkcache.cli.serve_bench.experiments import Experiment
from chunkcache.cli.serve_bench.metrics import Summary
from chunkcache.cli.serve_bench.search import SearchResult


@dataclass
class ContenderResult:
    """What one contender did with one workload.

    Attributes:
        comparison: its outputs beside the reference's; None if it is the reference itself.
        summaries: one for each repeat.
        search: the highest rate under the limit; None if it was not looked for.
        failure: why there is nothing more; None if nothing failed.
    """

    comparison: Comparison | None = None
    summaries: list[Summary] = field(default_factory=list)
    search: SearchResult | None = None
    failure: str | None = None

    @property
    def typical(self) -> Summary | None:
        """The repeat of median normalised latency (the lower one of two), None without any."""
        ordered = sorted(self.summaries, key=lambda summary: summary.normalised_latency_ms)
        return ordered[(len(ordered) - 1) // 2] if ordered else None

    @property
    def latency_ms(self) -> float | None:
        """The median of the repeats' mean normalised latencies."""
        values = [summary.normalised_latency_ms for summary in self.summaries]
        return median(values) if values else None

    @property
    def spread(self) -> float | None:
        """The range of the repeats' normalised latencies over their median; None for one."""
        values = [summary.normalised_latency_ms for summary in self.summaries]
        return (max(values) - min(values)) / median(values) if len(values) > 1 else None

    def record(self) -> dict[str, Any]:
        """Return everything as a dictionary that JSON can hold."""
        return {
            "failure": self.failure,
            "comparison": self.comparison and asdict(self.comparison),
            "normalised_latency_ms": self.latency_ms,
            "spread": self.spread,
            "runs": [summary.record() for summary in self.summaries],
            "search": self.search and asdict(self.search),
        }


@dataclass
class ExperimentResult:
    """What all contenders did with one workload."""

    experiment: Experiment
    contenders: dict[str, ContenderResult]


@dataclass
class BenchResult:
    """A whole benchmark.

    Attributes:
        machine: what it ran on, and how.
        options: the caller's choices.
        experiments: in their order; those not run yet are missing.
    """

    machine: dict[str, Any]
    options: dict[str, Any]
    experiments: list[ExperimentResult] = field(default_factory=list)
