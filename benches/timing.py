"""Interleaved timing: every contender is measured in turn, round after round, in one process.

A shared machine changes speed by the minute. Contenders that take turns see the same machine,
so that their ratios mean something where their seconds do not.
"""

from __future__ import annotations

import datetime
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Seconds of rest before each sample; an OpenMP runtime lets its threads spin for about 20 ms.
SETTLE = 0.03


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median over the rounds, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """Summarise the seconds per call of at least two rounds."""
        low, median, high = statistics.quantiles(seconds, n=4)
        return cls(median, low, high)

    @property
    def spread(self) -> float:
        """Interquartile range over the median."""
        return (self.high - self.low) / self.median


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    *,
    budget: float = 3.0,
    min_rounds: int = 7,
    min_sample: float = 5e-3,
) -> dict[str, Timing]:
    """Time ``contenders`` in turn.

    Args:
        contenders: Name to a function of no arguments.
        budget: Seconds to spend on all of them together, warm-up excluded.
        min_rounds: Rounds that are made even when the budget is spent.
        min_sample: Seconds that one sample lasts at least: short calls are repeated within it.
    """
    repeats = {}
    for name, call in contenders.items():
        call()
        begin = time.perf_counter()
        call()
        repeats[name] = max(1, round(min_sample / max(time.perf_counter() - begin, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order, turns = random.Random(0), list(contenders.items())
    deadline = time.perf_counter() + budget
    rounds = 0
    while rounds < min_rounds or time.perf_counter() < deadline:
        # What ran before leaves its mark on caches and clock: no one always follows the same.
        for name, call in order.sample(turns, len(turns)):
            count = repeats[name]
            # The threads of whoever ran before may still spin, on the cores that this one needs.
            time.sleep(SETTLE)
            call()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            samples[name].append((time.perf_counter() - begin) / count)
        rounds += 1
    return {name: Timing.of(seconds) for name, seconds in samples.items()}


def machine(**versions: str) -> dict[str, str]:
    """The processor, the system, the command and the versions that a figure belongs to."""
    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            models = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
        processor = f"{models[0]}, {len(models)} logical cores"
    except (OSError, IndexError):
        pass
    return {
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(sys.argv),
        "processor": processor,
        "system": platform.platform(),
        "python": platform.python_version(),
        **versions,
    }
