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
        throughputs: one for each run with all requests there at once.
        summaries: one for each repeat of the run with the workload's arrivals.
        search: the highest rate under the limit; None if it was not looked for.
        failure: why there is nothing more; None if nothing failed.
        out_of_time: whether the time limit came before all was done.
    """

    comparison: Comparison | None = None
    throughputs: list[Summary] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)
    search: SearchResult | None = None
    failure: str | None = None
    out_of_time: bool = False

    @property
    def typical(self) -> Summary | None:
        """The repeat of median normalised latency (the lower one of two), None without any."""
        ordered = sorted(self.summaries, key=lambda summary: summary.normalised_latency_ms)
        return ordered[(len(ordered) - 1) // 2] if ordered else None

    @property
    def typical_throughput(self) -> Summary | None:
        """The run of median throughput (the lower one of two), None without any."""
        ordered = sorted(self.throughputs, key=lambda summary: summary.requests_per_second)
        return ordered[(len(ordered) - 1) // 2] if ordered else None

    @property
    def peak_kv_bytes(self) -> int | None:
        """The most of any run with the workload's arrivals; of the others if there is none."""
        peaks = [summary.peak_kv_bytes for summary in self.summaries or self.throughputs]
        return max(peaks, default=None)

    @property
    def throughput_rps(self) -> float | None:
        """Requests per second with all there at once, the median of the runs; None without any."""
        values = [summary.requests_per_second for summary in self.throughputs]
        return median(values) if values else None

    @property
    def throughput_spread(self) -> float | None:
        """The range of those over their median; None for one."""
        return _spread([summary.requests_per_second for summary in self.throughputs])

    @property
    def latency_ms(self) -> float | None:
        """The median of the repeats' mean normalised latencies."""
        values = [summary.normalised_latency_ms for summary in self.summaries]
        return median(values) if values else None

    @property
    def spread(self) -> float | None:
        """The range of the repeats' normalised latencies over their median; None for one."""
        return _spread([summary.normalised_latency_ms for summary in self.summaries])

    def record(self) -> dict[str, Any]:
        """Return everything as a dictionary that JSON can hold."""
        return {
            "failure": self.failure,
            "out_of_time": self.out_of_time,
            "comparison": self.comparison and asdict(self.comparison),
            "normalised_latency_ms": self.latency_ms,
            "spread": self.spread,
            "runs": [summary.record() for summary in self.summaries],
            "throughput_rps": self.throughput_rps,
            "throughput_spread": self.throughput_spread,
            "throughput_runs": [summary.record() for summary in self.throughputs],
            "search": self.search and self.search.record(),
        }


def _spread(values: list[float]) -> float | None:
    return (max(values) - min(values)) / median(values) if len(values) > 1 else None


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
