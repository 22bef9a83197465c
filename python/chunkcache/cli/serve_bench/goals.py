"""Sharing on beside sharing off, and what is to be reached.

The paper's claims: with wholly shared prompts 70 to 90 % less K/V memory, 1.6 times the requests
per second under the same latency for prompts of 1,024 tokens and 2.3 times for 2,048; without a
shared prefix nothing lost, which here means 3 % of the latency and of the throughput.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from chunkcache.cli.serve_bench.metrics import Summary
from chunkcache.cli.serve_bench.results import ExperimentResult
from chunkcache.cli.serve_bench.search import SearchResult

LEAST_MEMORY_SAVED = 0.70
MOST_LOST = 0.03
LEAST_RATE_RATIO = {1024: 1.6, 2048: 2.3}


@dataclass(frozen=True)
class Goal:
    """A figure of sharing on against sharing off.

    Attributes:
        name: what it is.
        value: what was measured.
        wanted: the bound.
        is_met: whether it holds; None if there is no bound for this workload.
        is_share: whether it is a share of 1, else a ratio.
        least, most: what the value lies between, where that is known; None without that bound.
    """

    name: str
    value: float
    wanted: float | None
    is_met: bool | None
    is_share: bool = True
    least: float | None = None
    most: float | None = None

    def record(self) -> dict[str, Any]:
        """Return it as a dictionary that JSON can hold."""
        return asdict(self)


def goals_of(result: ExperimentResult) -> list[Goal]:
    """Return the figures that can be formed; none without both halves."""
    on, off = result.contenders.get("sharing on"), result.contenders.get("sharing off")
    row = result.experiment.row
    if on is None or off is None:
        return []
    wholly_shared = row is not None and row.n_s == row.n_p
    most_lost = MOST_LOST if row is not None and row.n_s == 0 else None
    goals = []
    if on.peak_kv_bytes and off.peak_kv_bytes:
        saved = 1 - on.peak_kv_bytes / off.peak_kv_bytes
        goals.append(
            _at_least("K/V memory saved", saved, LEAST_MEMORY_SAVED if wholly_shared else None)
        )
    latencies = _ratios(on.summaries, off.summaries, lambda s: s.normalised_latency_ms)
    if latencies:
        goals.append(_at_most("latency lost", median(latencies) - 1, most_lost))
    throughputs = _ratios(on.throughputs, off.throughputs, lambda s: s.requests_per_second)
    if throughputs and most_lost is not None:
        goals.append(_at_most("throughput lost", 1 - median(throughputs), most_lost))
    elif throughputs:
        goals.append(_ratio("throughput, on / off", median(throughputs), None))
    if on.search is not None and off.search is not None and row is not None:
        wanted = LEAST_RATE_RATIO.get(row.n_p) if wholly_shared else None
        goals.extend(_rates(on.search, off.search, wanted))
    return goals


def _ratios(
    on: list[Summary], off: list[Summary], figure: Callable[[Summary], float]
) -> list[float]:
    """Return on over off of the runs that were made in turn, one right after the other."""
    return [figure(a) / figure(b) for a, b in zip(on, off, strict=False)]


def _rates(on: SearchResult, off: SearchResult, wanted: float | None) -> list[Goal]:
    """Return the ratio of the rates found, and what it lies between."""
    least = on.rps / off.missed_rps if off.missed_rps else None
    most = on.missed_rps / off.rps if on.missed_rps and off.rps else None
    # If no rate kept off within the limit, the ratio is the least that it can be.
    value = on.rps / off.rps if off.rps else least
    if not value:
        return []
    return [_ratio("request rate, on / off", value, wanted, least, most)]


def _ratio(
    name: str,
    value: float,
    wanted: float | None,
    least: float | None = None,
    most: float | None = None,
) -> Goal:
    is_met = None if wanted is None else value >= wanted
    return Goal(name, value, wanted, is_met, is_share=False, least=least, most=most)


def _at_least(name: str, value: float, wanted: float | None) -> Goal:
    return Goal(name, value, wanted, None if wanted is None else value >= wanted)


def _at_most(name: str, value: float, wanted: float | None) -> Goal:
    return Goal(name, value, wanted, None if wanted is None else value <= wanted)
