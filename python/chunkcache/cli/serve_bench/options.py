"""What the caller of the benchmark chooses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from chunkcache.cli.serve_bench.traces import TraceFormat
from chunkcache.cli.serve_bench.workload import Row
from chunkcache.errors import InvalidConfigError

SHARING_ON, SHARING_OFF, TRANSFORMERS = CONTENDERS = ("on", "off", "transformers")

#: ChunkAttention's end-to-end table: (n_p, n_s, n_c, RPS).
PAPER_ROWS = (
    Row(1024, 0, 512, 1.0),
    Row(1024, 1024, 512, 1.0),
    Row(2048, 0, 512, 0.6),
    Row(2048, 2048, 512, 0.6),
    Row(4096, 0, 512, 0.4),
    Row(4096, 4096, 512, 0.4),
)

#: Its prompts, with completions and rates that a CPU gets through.
CPU_ROWS = (
    Row(1024, 0, 32, 0.25),
    Row(1024, 1024, 32, 0.25),
    Row(2048, 0, 32, 0.15),
    Row(2048, 2048, 32, 0.15),
)


@dataclass(frozen=True)
class Profile:
    """The defaults of a device.

    Attributes:
        model: name of the model.
        dtype: of its weights and K/V.
        rows: the workloads.
        num_requests: of a run.
        latency_limit_ms: normalised latency that the search allows, in milliseconds per token.
        max_num_batched_tokens: tokens of a step.
    """

    model: str
    dtype: str
    rows: tuple[Row, ...]
    num_requests: int
    latency_limit_ms: float
    max_num_batched_tokens: int


PROFILES = {
    "cpu": Profile("smollm2-135m-instruct", "float32", CPU_ROWS, 12, 300.0, 512),
    # 40 ms per token is the paper's limit.
    "cuda": Profile("llama-2-7b-shape", "float16", PAPER_ROWS, 64, 40.0, 2048),
}


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The choices, complete.

    Attributes:
        device: "cpu" or "cuda".
        model: name or path of the model.
        dtype: of its weights and K/V.
        rows: Poisson workloads; not used with ``trace``.
        trace: a recorded trace to replay instead.
        trace_format: of the trace; None to tell by its first line.
        speed: seconds of the trace in one second.
        scale: factor of all lengths.
        num_requests: of a Poisson run.
        max_trace_requests: the first so many of a trace are replayed; None for all.
        num_prefixes: different shared prefixes of a Poisson workload.
        seed: of everything that is drawn.
        throughput_runs: runs of each contender with all requests there at once.
        repeats: runs of each contender on each workload, with its arrivals.
        contenders: of `CONTENDERS`.
        search: whether to look for the highest rate under the limit; Poisson workloads only. What
            is served with as many requests at once as may run together bounds it.
        latency_limit_ms: that limit, in milliseconds per token.
        tolerance: precision of the search, as a share of the rate.
        max_trials: runs that a search may make.
        search_seconds: arrivals of such a run go on for about so long; there are 8 at least.
        time_limit: seconds that all may take; None for no limit. What does not fit is left out.
        sample: requests of each workload whose outputs are compared first.
        max_num_seqs, max_num_batched_tokens, chunk_size, capacity_bytes: of every contender.
    """

    device: str
    model: str
    dtype: str
    rows: tuple[Row, ...]
    trace: Path | None
    trace_format: TraceFormat | None
    speed: float
    scale: float
    num_requests: int
    max_trace_requests: int | None
    num_prefixes: int
    seed: int
    throughput_runs: int
    repeats: int
    contenders: tuple[str, ...]
    search: bool
    latency_limit_ms: float
    tolerance: float
    max_trials: int
    search_seconds: float
    time_limit: float | None
    sample: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_size: int
    capacity_bytes: int | None

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        for name in ("speed", "scale", "latency_limit_ms", "tolerance", "search_seconds"):
            _check_above_zero(name, getattr(self, name))
        if self.time_limit is not None:
            _check_above_zero("time_limit", self.time_limit)
        searches = self.search and self.trace is None
        if not (self.throughput_runs or self.repeats or searches):
            raise InvalidConfigError(
                f"throughput_runs and repeats are 0 and search is {self.search}"
                f"{'' if self.trace is None else ' with a trace'}; allowed is at least one of them "
                "to measure by (a search needs rows)"
            )
        for name in self.contenders:
            if name not in CONTENDERS:
                raise InvalidConfigError(
                    f"contender is {name!r}; allowed is {', '.join(CONTENDERS)}"
                )
        if len(set(self.contenders)) != len(self.contenders) or not self.contenders:
            raise InvalidConfigError(
                f"contenders are {', '.join(self.contenders) or 'none'}; allowed is each once"
            )


def _check_above_zero(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InvalidConfigError(f"{name} is {value}; allowed is a number above 0")
