"""Runs the benchmark: outputs compared first, then every workload on every contender in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from chunkcache.cli.serve_bench import machine, models
from chunkcache.cli.serve_bench.clock import Clock
from chunkcache.cli.serve_bench.compare import CLOSE_LOGITS, compare_outputs
from chunkcache.cli.serve_bench.contenders import Contender, EngineContender, ServerLimits
from chunkcache.cli.serve_bench.experiments import (
    Experiment,
    make_experiments,
    requests_of_trial,
)
from chunkcache.cli.serve_bench.metrics import summarise
from chunkcache.cli.serve_bench.options import (
    SHARING_OFF,
    SHARING_ON,
    TRANSFORMERS,
    BenchOptions,
)
from chunkcache.cli.serve_bench.progress import BenchProgress
from chunkcache.cli.serve_bench.results import BenchResult, ContenderResult, ExperimentResult
from chunkcache.cli.serve_bench.search import highest_rate
from chunkcache.cli.serve_bench.transformers_batching import ContinuousBatching
from chunkcache.cli.serve_bench.watch import OverLimitError, Watcher
from chunkcache.cli.serve_bench.workload import Row
from chunkcache.engine import EngineConfig, ModelSpec
from chunkcache.engine.capacity import pool_capacity
from chunkcache.engine.inspection import inspect_model
from chunkcache.errors import ChunkCacheError

# Tokens of each compared answer, at most.
_SAMPLE_TOKENS = 16
# The pools of all contenders are there at once, and the model's activations besides.
_MEMORY_FRACTION = 0.6


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
        clock: what the engine's runs go by; transformers keeps real time whatever it is.
        on_result: called with what there is so far, after each run that counts and each search.

    Raises:
        ChunkCacheError: an option is not allowed, or the engine failed. That transformers fails
            is a result.
    """
    model = models.load(options.model, options.dtype, options.device)
    spec = inspect_model(model)
    experiments = make_experiments(options, spec)
    contenders = _contenders(options, model, _limits(options, spec, model, experiments), clock)
    result = BenchResult(machine.describe(options.device), _record(options))
    with BenchProgress(console, _num_requests(options, experiments)) as progress:
        for experiment in experiments:
            bench = _ExperimentBench(options, spec, contenders, experiment, progress)
            result.experiments.append(bench.result)
            bench.compare()
            for _ in chain(bench.measure(), bench.search()):
                on_result(result)
    return result


def _limits(
    options: BenchOptions, spec: ModelSpec, model: Any, experiments: list[Experiment]
) -> ServerLimits:
    chunk_bytes = spec.chunk_bytes(options.chunk_size)
    config = EngineConfig(
        chunk_size=options.chunk_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        capacity_bytes=options.capacity_bytes,
        memory_fraction=(
            None if options.capacity_bytes else _MEMORY_FRACTION / len(options.contenders)
        ),
    )
    affordable = pool_capacity(config, spec, chunk_bytes, model.device)
    longest = max(experiment.longest for experiment in experiments)
    useful = options.max_num_seqs * -(-longest // options.chunk_size)
    return ServerLimits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        chunk_size=options.chunk_size,
        capacity=affordable if options.capacity_bytes else min(affordable, useful),
    )


def _contenders(
    options: BenchOptions, model: Any, limits: ServerLimits, clock: Clock
) -> list[Contender]:
    make: dict[str, Callable[[], Contender]] = {
        SHARING_ON: lambda: EngineContender(model, limits, clock, sharing=True),
        SHARING_OFF: lambda: EngineContender(model, limits, clock, sharing=False),
        TRANSFORMERS: lambda: ContinuousBatching(model, limits),
    }
    return [make[name]() for name in options.contenders]


def _num_requests(options: BenchOptions, experiments: list[Experiment]) -> int:
    num_requests = 0
    for experiment in experiments:
        searched = options.max_trials if options.search and experiment.row else 0
        num_requests += len(experiment.requests) * (options.repeats + searched)
    return num_requests * len(options.contenders)


def _record(options: BenchOptions) -> dict[str, Any]:
    record = dataclasses.asdict(options)
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in record.items()
    }


class _ExperimentBench:
    """One workload on all contenders."""

    def __init__(
        self,
        options: BenchOptions,
        spec: ModelSpec,
        contenders: list[Contender],
        experiment: Experiment,
        progress: BenchProgress,
    ) -> None:
        self._options = options
        self._spec = spec
        self._experiment = experiment
        self._progress = progress
        self._contenders = contenders
        self.result = ExperimentResult(
            experiment, {contender.name: ContenderResult() for contender in contenders}
        )

    def compare(self) -> None:
        """Compare the outputs of a sample of the requests.

        Raises:
            ChunkCacheError: our own halves differ, where float32 lets that be told.
        """
        sample = [
            replace(request, num_output_tokens=min(request.num_output_tokens, _SAMPLE_TOKENS))
            for request in self._experiment.requests[: self._options.sample]
        ]
        engines = [c for c in self._contenders if isinstance(c, EngineContender)]
        if not engines or not sample:
            return
        self._begin("comparing outputs")
        reference = engines[0].generate_with_margins(sample)
        for contender in self._contenders:
            if contender is engines[0]:
                continue
            result = self.result.contenders[contender.name]
            with _Failures(contender, result):
                comparison = compare_outputs(reference, contender.generate(sample))
                result.comparison = comparison
                if not comparison.equal and self._spec.dtype == "float32":
                    raise ChunkCacheError(
                        f"{contender.name} gives other outputs than {engines[0].name}: "
                        f"{comparison.num_equal} of {comparison.num_compared} tokens are equal "
                        f"where the two best logits are {CLOSE_LOGITS:g} apart or more"
                    )

    def measure(self) -> Iterator[None]:
        """Run the workload as often as wanted; who goes first changes. Yields after each run."""
        requests = self._experiment.requests
        for repeat in range(self._options.repeats):
            turn = repeat % len(self._contenders)
            for contender in [*self._contenders[turn:], *self._contenders[:turn]]:
                result = self.result.contenders[contender.name]
                watcher = Watcher(requests, on_finished=self._progress.advance)
                if result.failure is None:
                    self._begin(contender.name)
                    with _Failures(contender, result):
                        result.summaries.append(summarise(contender.serve(requests, watcher)))
                self._progress.advance(watcher.num_unfinished)
                yield

    def search(self) -> Iterator[None]:
        """Find each contender's highest rate under the limit, for a Poisson workload.

        Yields after each contender.
        """
        row = self._experiment.row
        if row is None or not self._options.search:
            return
        for contender in self._contenders:
            result = self.result.contenders[contender.name]
            num_left = self._options.max_trials
            if result.failure is None:
                with _Failures(contender, result):
                    result.search = highest_rate(
                        partial(self._latency_at, contender, row),
                        self._options.latency_limit_ms,
                        row.rps,
                        tolerance=self._options.tolerance,
                        max_trials=self._options.max_trials,
                    )
                    num_left -= len(result.search.trials)
            self._progress.advance(num_left * len(self._experiment.requests))
            yield

    def _latency_at(self, contender: Contender, row: Row, rps: float) -> float | None:
        requests = requests_of_trial(self._options, self._spec, row, rps)
        self._progress.expect(len(requests) - len(self._experiment.requests))
        self._begin(f"{contender.name}, search at {rps:.3g}/s")
        watcher = Watcher(
            requests,
            limit_ms=self._options.latency_limit_ms,
            on_finished=self._progress.advance,
        )
        try:
            return summarise(contender.serve(requests, watcher)).normalised_latency_ms
        except OverLimitError:
            return None
        finally:
            self._progress.advance(watcher.num_unfinished)

    def _begin(self, what: str) -> None:
        self._progress.begin(f"{self._experiment.label}: {what}")


class _Failures:
    """Takes down that a contender failed, unless it is our own."""

    def __init__(self, contender: Contender, result: ContenderResult) -> None:
        self._is_own = isinstance(contender, EngineContender)
        self._result = result

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if self._is_own or not isinstance(error, Exception):
            return False
        self._result.failure = f"{type(error).__name__}: {error}"
        return True
