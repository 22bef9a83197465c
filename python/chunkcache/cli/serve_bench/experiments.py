"""The workloads of a benchmark, as its options ask for them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from chunkcache.cli.serve_bench.options import BenchOptions
from chunkcache.cli.serve_bench.replay import replayed
from chunkcache.cli.serve_bench.traces import read_trace
from chunkcache.cli.serve_bench.workload import Row, TimedRequest, poisson_workload
from chunkcache.engine import ModelSpec
from chunkcache.errors import InvalidConfigError

# Of a search's run: fewer say nothing of a rate.
_LEAST_REQUESTS = 8


@dataclass(frozen=True)
class Experiment:
    """A workload and what it is called.

    Attributes:
        label: its name in tables.
        requests: by arrival.
        row: of a Poisson workload; None for a trace.
        origin: where the requests come from, for JSON.
    """

    label: str
    requests: list[TimedRequest]
    row: Row | None
    origin: dict[str, Any]

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its continuation."""
        return max(len(r.prompt) + r.num_output_tokens for r in self.requests)


def make_experiments(options: BenchOptions, spec: ModelSpec) -> list[Experiment]:
    """Make every workload.

    Raises:
        InvalidConfigError: a workload does not fit the model, or the trace is malformed.
        OSError: the trace cannot be read.
    """
    if options.trace is not None:
        return [_replay(options, spec, options.trace)]
    experiments = []
    for given in options.rows:
        row = given.scaled(options.scale)
        limit = spec.max_model_len
        if limit is not None and row.n_p + row.n_c > limit:
            raise InvalidConfigError(
                f"row {row.label} has {row.n_p + row.n_c} tokens; allowed for the model is {limit}"
            )
        requests = _poisson(options, spec, row, options.num_requests)
        experiments.append(Experiment(row.label, requests, row, {"row": asdict(row)}))
    return experiments


def requests_of_trial(
    options: BenchOptions, spec: ModelSpec, row: Row, rps: float
) -> list[TimedRequest]:
    """Return the requests of a search's run: those of ``row`` at another rate, and as many as come.

    They begin like the row's own ones, at times that are only scaled.
    """
    num_requests = max(_LEAST_REQUESTS, math.ceil(rps * options.search_seconds))
    return _poisson(options, spec, replace(row, rps=rps), num_requests)


def _poisson(
    options: BenchOptions, spec: ModelSpec, row: Row, num_requests: int
) -> list[TimedRequest]:
    return poisson_workload(
        row,
        num_requests,
        num_prefixes=options.num_prefixes,
        vocab_size=spec.vocab_size,
        seed=options.seed,
    )


def _replay(options: BenchOptions, spec: ModelSpec, path: Path) -> Experiment:
    found, entries = read_trace(path, options.trace_format, options.max_trace_requests)
    requests = replayed(
        entries,
        speed=options.speed,
        scale=options.scale,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        seed=options.seed,
    )
    origin = {
        "trace": path.name,
        "format": str(found),
        "speed": options.speed,
        "scale": options.scale,
        "num_requests": len(requests),
        "num_prompt_tokens": sum(len(request.prompt) for request in requests),
        "num_output_tokens": sum(request.num_output_tokens for request in requests),
    }
    return Experiment(f"{path.name} x{options.speed:g}", requests, None, origin)
