"""One workload on the contenders: outputs compared, then runs and a search, all in turns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from types import TracebackType

from chunkcache.cli.serve_bench.budget import TimeBudget
from chunkcache.cli.serve_bench.compare import CLOSE_LOGITS, compare_outputs
from chunkcache.cli.serve_bench.contenders import Contender, EngineContender
from chunkcache.cli.serve_bench.experiments import requests_of_trial
from chunkcache.cli.serve_bench.metrics import Summary, summarise
from chunkcache.cli.serve_bench.options import BenchOptions
from chunkcache.cli.serve_bench.progress import BenchProgress
from chunkcache.cli.serve_bench.results import ContenderResult, ExperimentResult
from chunkcache.cli.serve_bench.search import RateSearch
from chunkcache.cli.serve_bench.turns import in_turns
from chunkcache.cli.serve_bench.watch import OutOfTimeError, OverLimitError, Watcher
from chunkcache.cli.serve_bench.workload import Row, TimedRequest
from chunkcache.engine import ModelSpec
from chunkcache.errors import ChunkCacheError

# Tokens of each compared answer, at most.
_SAMPLE_TOKENS = 16


class ExperimentBench:
    """One workload on all contenders, some of them at a time."""

    def __init__(
        self,
        options: BenchOptions,
        spec: ModelSpec,
        result: ExperimentResult,
        progress: BenchProgress,
        budget: TimeBudget,
    ) -> None:
        """Begin without a run; what is found goes into ``result``."""
        self._options = options
        self._spec = spec
        self._result = result
        self._experiment = result.experiment
        self._progress = progress
        self._budget = budget
        # What the first engine says.
        self._reference_name = ""
        self._reference: list[list[tuple[int, float]]] | None = None

    def run(self, group: Sequence[Contender]) -> Iterator[None]:
        """Run the workload on contenders that are there together. Yields after each run."""
        self._compare(group)
        requests = self._experiment.requests
        at_once = [replace(request, arrival=0.0) for request in requests]
        for contender in in_turns(group, self._options.throughput_runs):
            result = self._result.contenders[contender.name]
            summary = self._measure(contender, at_once, "all at once")
            result.throughputs.extend(summary)
            yield
        for contender in in_turns(group, self._options.repeats):
            result = self._result.contenders[contender.name]
            result.summaries.extend(self._measure(contender, requests, "arrivals"))
            yield
        yield from self._search(group)

    def _compare(self, group: Sequence[Contender]) -> None:
        """Compare the outputs of a sample of the requests.

        Raises:
            ChunkCacheError: our own halves differ, where float32 lets that be told.
        """
        sample = [
            replace(request, num_output_tokens=min(request.num_output_tokens, _SAMPLE_TOKENS))
            for request in self._experiment.requests[: self._options.sample]
        ]
        if not sample or self._budget.left <= 0:
            return
        self._begin("comparing outputs")
        for contender in group:
            if self._reference is None:
                if isinstance(contender, EngineContender):
                    self._reference = contender.generate_with_margins(sample)
                    self._reference_name = contender.name
                continue
            result = self._result.contenders[contender.name]
            with _Failures(contender, result):
                comparison = compare_outputs(self._reference, contender.generate(sample))
                result.comparison = comparison
                if not comparison.equal and self._spec.dtype == "float32":
                    raise ChunkCacheError(
                        f"{contender.name} gives other outputs than {self._reference_name}: "
                        f"{comparison.num_equal} of {comparison.num_compared} tokens are equal "
                        f"where the two best logits are {CLOSE_LOGITS:g} apart or more"
                    )

    def _measure(
        self, contender: Contender, requests: list[TimedRequest], what: str
    ) -> list[Summary]:
        """Run requests to their end, and return the figures if that was possible."""
        result = self._result.contenders[contender.name]
        watcher = Watcher(requests, seconds=self._budget.left, on_finished=self._progress.advance)
        found: list[Summary] = []
        if result.failure is None and self._has_time(contender, 0.0, self._budget.left):
            self._begin(f"{contender.name}, {what}")
            with _Failures(contender, result):
                found = [summarise(contender.serve(requests, watcher))]
        self._progress.advance(watcher.num_unfinished)
        return found

    def _search(self, group: Sequence[Contender]) -> Iterator[None]:
        """Find each contender's highest rate under the limit, for a Poisson workload.

        They make their trials in turns.
        """
        row = self._experiment.row
        if row is None or not self._options.search:
            return
        searches = {contender.name: self._new_search(contender, row) for contender in group}
        searching = list(group)
        while searching:
            for contender in list(searching):
                search = searches[contender.name]
                result = self._result.contenders[contender.name]
                with _Failures(contender, result):
                    if result.failure is None and self._try(contender, row, search):
                        result.search = search.result
                        yield
                        continue
                searching.remove(contender)
                num_trials = len(search.result.trials)
                num_left = self._options.max_trials - num_trials
                self._progress.advance(num_left * len(self._experiment.requests))

    def _new_search(self, contender: Contender, row: Row) -> RateSearch:
        """Begin with what the runs so far say of the contender."""
        result = self._result.contenders[contender.name]
        throughput = result.throughput_rps
        # Fewer requests at once are a smaller batch than there may be.
        is_most = len(self._experiment.requests) >= self._options.max_num_seqs
        search = RateSearch(
            self._options.latency_limit_ms,
            row.rps if throughput is None else throughput,
            tolerance=self._options.tolerance,
            max_trials=self._options.max_trials,
            highest=math.inf if throughput is None or not is_most else throughput,
        )
        latencies = [summary.normalised_latency_ms for summary in result.throughputs]
        if throughput and is_most and median(latencies) > self._options.latency_limit_ms:
            # The rate can be kept up, but by a full batch, which is over the limit. A short run
            # ends before its batch is full.
            search.learn(throughput, median(latencies))
        if result.latency_ms is not None:
            search.learn(row.rps, result.latency_ms)
        return search

    def _try(self, contender: Contender, row: Row, search: RateSearch) -> bool:
        """Make the next trial of a search; False if there is none, or no time for it."""
        rps = search.next_rate
        if rps is None:
            return False
        requests = requests_of_trial(self._options, self._spec, row, rps)
        if not self._has_time(
            contender, self._seconds_of(contender, requests), self._budget.left_of_part
        ):
            return False
        self._progress.expect(len(requests) - len(self._experiment.requests))
        self._begin(f"{contender.name}, search at {rps:.3g}/s")
        watcher = Watcher(
            requests,
            limit_ms=self._options.latency_limit_ms,
            seconds=self._budget.left,
            on_finished=self._progress.advance,
        )
        try:
            search.note(summarise(contender.serve(requests, watcher)))
        except OverLimitError:
            search.note(None)
        finally:
            self._progress.advance(watcher.num_unfinished)
        return True

    def _seconds_of(self, contender: Contender, requests: list[TimedRequest]) -> float:
        """Return how long a run may take that keeps within the limit."""
        latencies = [self._options.latency_limit_ms]
        for summary in self._result.contenders[contender.name].throughputs:
            # Arrivals that are spread leave no request waiting for longer.
            latencies.append(summary.normalised_latency_ms)
        last = requests[-1]
        return last.arrival + last.num_output_tokens * min(latencies) / 1e3

    def _has_time(self, contender: Contender, seconds: float, left: float) -> bool:
        """Tell whether so many seconds are left, and take it down if they are not."""
        if seconds < left:
            return True
        self._result.contenders[contender.name].out_of_time = True
        return False

    def _begin(self, what: str) -> None:
        self._progress.begin(f"{self._experiment.label}: {what}")


class _Failures:
    """Takes down that time was over, or that a contender failed unless it is our own."""

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
        if isinstance(error, OutOfTimeError):
            self._result.out_of_time = True
            return True
        if self._is_own or not isinstance(error, Exception):
            return False
        self._result.failure = f"{type(error).__name__}: {error}"
        return True
