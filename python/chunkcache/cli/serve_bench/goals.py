"""Sharing on beside sharing off, and what is to be reached.

The paper's claims: with wholly shared prompts 70 to 90 % less K/V memory, 1.6 times the requests
per second under the same latency for prompts of 1,024 tokens and 2.3 times for 2,048; without a
shared prefix nothing lost, which here means 3 % of the latency.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from chunkcache.cli.serve_bench.results import ContenderResult, ExperimentResult

LEAST_MEMORY_SAVED = 0.70
MOST_LATENCY_LOST = 0.03
LEAST_RATE_RATIO = {1024: 1.6, 2048: 2.3}


@dataclass(frozen=True)
class Goal:
    """A figure of sharing on against sharing off.

    Attributes:
        name: what it is.
        value: what was measured.
        wanted: the bound.
        is_met: whether it holds; None if there is no bound for this workload.
    """

    name: str
    value: float
    wanted: float | None
    is_met: bool | None

    def record(self) -> dict[str, Any]:
        """Return it as a dictionary that JSON can hold."""
        return asdict(self)


def goals_of(result: ExperimentResult) -> list[Goal]:
    """Return the figures that can be formed; none without both halves."""
    on, off = result.contenders.get("sharing on"), result.contenders.get("sharing off")
    row = result.experiment.row
    if on is None or off is None or on.latency_ms is None or off.latency_ms is None:
        return []
    wholly_shared = row is not None and row.n_s == row.n_p
    not_shared = row is not None and row.n_s == 0
    saved = 1 - _peak_kv_bytes(on) / _peak_kv_bytes(off)
    lost = on.latency_ms / off.latency_ms - 1
    goals = [
        _at_least("K/V memory saved", saved, LEAST_MEMORY_SAVED if wholly_shared else None),
        _at_most("latency lost", lost, MOST_LATENCY_LOST if not_shared else None),
    ]
    if on.search is not None and off.search is not None and off.search.rps > 0:
        wanted = LEAST_RATE_RATIO.get(row.n_p) if row is not None and wholly_shared else None
        goals.append(_at_least("request rate, on / off", on.search.rps / off.search.rps, wanted))
    return goals


def _peak_kv_bytes(result: ContenderResult) -> int:
    return max(summary.peak_kv_bytes for summary in result.summaries)


def _at_least(name: str, value: float, wanted: float | None) -> Goal:
    return Goal(name, value, wanted, None if wanted is None else value >= wanted)


def _at_most(name: str, value: float, wanted: float | None) -> Goal:
    return Goal(name, value, wanted, None if wanted is None else value <= wanted)
