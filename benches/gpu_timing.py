"""Contenders for one step on a CUDA device, recorded as graphs and replayed in turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

#: Launches of a contender that rotate over buffers of this many bytes find nothing in the L2.
COLD_BYTES = 270e6
#: Microseconds that one replay lasts about, and most launches in a graph.
REPLAY_US = 2500.0
MAX_LAUNCHES = 96
#: Cycles that the device is kept busy while the host queues a replay.
QUEUE_CYCLES = 150_000


@dataclass(frozen=True)
class Timing:
    """Microseconds a step: the median over the rounds, and the quartiles around it."""

    us: float
    low: float
    high: float

    @classmethod
    def of(cls, times: list[float]) -> Timing:
        """Summarise the rounds."""
        low, middle, high = statistics.quantiles(times, n=4)
        return cls(middle, low, high)


@dataclass(frozen=True)
class Contender:
    """A way to compute a step: its launch over each of the buffers in turn.

    Attributes:
        steps: one call for each buffer, which puts the work on torch's current stream.
        out: where the first of them leaves its output, or None if there is none to compare.
    """

    steps: list[Callable[[], object]]
    out: torch.Tensor | None = None


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    num_steps: int
    times: list[float] = field(default_factory=list)


def num_copies(num_bytes: int) -> int:
    """Return the buffers that a step of so many bytes has to rotate over to be cold."""
    if num_bytes > 16 * COLD_BYTES:
        return 1
    least = 2 if num_bytes > COLD_BYTES else 4
    return max(least, math.ceil(COLD_BYTES / num_bytes))


def interleave(contenders: Mapping[str, Contender], rounds: int) -> dict[str, Timing]:
    """Time contenders in turn, each by the replay of a graph of many steps."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    recorded = {}
    with torch.cuda.stream(stream):
        for name, contender in contenders.items():
            recorded[name] = _record(contender, stream)
        for _ in range(rounds):
            for each in recorded.values():
                each.times.append(_replay(each, stream))
    timings = {name: Timing.of(each.times) for name, each in recorded.items()}
    for each in recorded.values():
        each.graph.reset()
    return timings


def _record(contender: Contender, stream: torch.cuda.Stream) -> _Recorded:
    copies = len(contender.steps)
    for step in contender.steps[:2]:
        step()
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
    begin.record(stream)
    for step in contender.steps[:4]:
        step()
    end.record(stream)
    end.synchronize()
    estimate = begin.elapsed_time(end) * 1e3 / min(copies, 4)
    wanted = min(REPLAY_US / max(estimate, 1.0), MAX_LAUNCHES)
    laps = max(1, round(wanted / copies))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(laps):
            for step in contender.steps:
                step()
    each = _Recorded(graph, laps * copies)
    _replay(each, stream)
    return each


def _replay(each: _Recorded, stream: torch.cuda.Stream) -> float:
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
    # What the host takes to queue the graph is not the step's.
    torch.cuda._sleep(QUEUE_CYCLES)
    begin.record(stream)
    each.graph.replay()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / each.num_steps
