"""Runs the benchmark: every workload on every contender."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from chunkcache.cli.serve_bench import machine, models
from chunkcache.cli.serve_bench.budget import TimeBudget
from chunkcache.cli.serve_bench.clock import Clock
from chunkcache.cli.serve_bench.contenders import Contender, EngineContender, ServerLimits
from chunkcache.cli.serve_bench.experiment_bench import ExperimentBench
from chunkcache.cli.serve_bench.experiments import Experiment, make_experiments
from chunkcache.cli.serve_bench.options import (
    CONTENDERS,
    SHARING_OFF,
    SHARING_ON,
    TRANSFORMERS,
    BenchOptions,
)
from chunkcache.cli.serve_bench.progress import BenchProgress
from chunkcache.cli.serve_bench.results import BenchResult, ContenderResult, ExperimentResult
from chunkcache.cli.serve_bench.transformers_batching import ContinuousBatching
from chunkcache.cli.serve_bench.turns import server_limits
from chunkcache.engine.inspection import inspect_model


def run_bench(
    options: BenchOptions,
    console: Console,
    clock: Clock,
    on_result: Callable[[BenchResult], None] = lambda result: None,
) -> BenchResult:
    """Run everything that the options ask for.

    Args:
        options: the choices.
        console: shows the progress.
        clock: what the engine's runs and the time limit go by; transformers keeps real time
            whatever it is.
        on_result: called with what there is so far, after each run.

    Raises:
        ChunkCacheError: an option is not allowed, or the engine failed. That transformers fails
            is a result.
    """
    budget = TimeBudget(clock, options.time_limit)
    model = models.load(options.model, options.dtype, options.device)
    spec = inspect_model(model)
    experiments = make_experiments(options, spec)
    longest = max(experiment.longest for experiment in experiments)
    limits, num_together = server_limits(options, spec, model.device, longest)
    contenders = _contenders(options, model, limits, clock)
    groups = [contenders[i : i + num_together] for i in range(0, len(contenders), num_together)]
    result = BenchResult(machine.describe(options.device), _record(options))
    for experiment in experiments:
        of_each = {contender.name: ContenderResult() for contender in contenders}
        result.experiments.append(ExperimentResult(experiment, of_each))
        budget.expect(len(contenders))
    with BenchProgress(console, _num_requests(options, experiments), budget) as progress:
        benches = [
            ExperimentBench(options, spec, experiment, progress, budget)
            for experiment in result.experiments
        ]
        for group in groups:
            for bench in benches:
                budget.begin(len(group))
                for _ in bench.run(group):
                    on_result(result)
            for contender in group:
                contender.close()
    return result


def _contenders(
    options: BenchOptions, model: Any, limits: ServerLimits, clock: Clock
) -> list[Contender]:
    make: dict[str, Callable[[], Contender]] = {
        SHARING_ON: lambda: EngineContender(model, limits, clock, sharing=True),
        SHARING_OFF: lambda: EngineContender(model, limits, clock, sharing=False),
        TRANSFORMERS: lambda: ContinuousBatching(model, limits),
    }
    # In this order, so that our halves are in one group where two fit into the memory.
    return [make[name]() for name in CONTENDERS if name in options.contenders]


def _num_requests(options: BenchOptions, experiments: list[Experiment]) -> int:
    num_requests = 0
    for experiment in experiments:
        searched = options.max_trials if options.search and experiment.row else 0
        num_runs = options.throughput_runs + options.repeats + searched
        num_requests += len(experiment.requests) * num_runs
    return num_requests * len(options.contenders)


def _record(options: BenchOptions) -> dict[str, Any]:
    record = dataclasses.asdict(options)
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in record.items()
    }
