"""The engine as a contender of the benchmark, with prefix sharing and without."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from chunkcache.cli.serve_bench.clock import Clock
from chunkcache.cli.serve_bench.metrics import Run, ServedRequest
from chunkcache.cli.serve_bench.watch import Watcher
from chunkcache.cli.serve_bench.workload import TimedRequest
from chunkcache.engine import LLM, SamplingParams


@dataclass(frozen=True)
class ServerLimits:
    """What every contender gets, the same for all.

    Attributes:
        max_num_seqs: requests that run together at most.
        max_num_batched_tokens: tokens of a step at most.
        chunk_size: tokens of a chunk, which others call a page or a block.
        capacity: chunks of the K/V pool.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_size: int
    capacity: int


class Contender(Protocol):
    """A server that a workload can be run on."""

    name: str

    def close(self) -> None:
        """Give the memory back that it holds between runs; the next run takes it again."""

    def generate(self, requests: Sequence[TimedRequest]) -> list[list[int]]:
        """Return the greedy continuations of ``requests``, all at once, their arrival ignored."""

    def serve(self, workload: Sequence[TimedRequest], watcher: Watcher) -> Run:
        """Serve ``workload``, which is ordered by arrival, from an empty cache.

        Raises:
            OverLimitError: ``watcher`` has stopped it; what was unfinished is aborted.
            OutOfTimeError: likewise.
        """


class EngineContender:
    """`chunkcache.LLM`."""

    def __init__(self, model: Any, limits: ServerLimits, clock: Clock, *, sharing: bool) -> None:
        """Choose a loaded model. Its engine, which makes no text, is made when it is needed."""
        self.name = "sharing on" if sharing else "sharing off"
        self._model = model
        self._limits = limits
        self._clock = clock
        self._sharing = sharing
        self._open_llm: LLM | None = None

    @property
    def _llm(self) -> LLM:
        if self._open_llm is None:
            limits = self._limits
            self._open_llm = LLM(
                self._model,
                None,
                chunk_size=limits.chunk_size,
                capacity=limits.capacity,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                enable_prefix_sharing=self._sharing,
            )
        return self._open_llm

    def close(self) -> None:
        """Free the engine with its pool and its recorded steps."""
        self._open_llm = None
        # They are in reference cycles, and torch keeps what is freed for itself.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def generate(self, requests: Sequence[TimedRequest]) -> list[list[int]]:
        """Return the greedy continuations of ``requests``."""
        outputs = self._llm.generate(
            [request.prompt for request in requests],
            [_params(request) for request in requests],
            progress=False,
        )
        return [output.outputs[0].token_ids for output in outputs]

    def generate_with_margins(
        self, requests: Sequence[TimedRequest]
    ) -> list[list[tuple[int, float]]]:
        """Return each token with how far its logit is above the second best."""
        outputs = self._llm.generate(
            [request.prompt for request in requests],
            [_params(request, logprobs=2) for request in requests],
            progress=False,
        )
        return [
            [
                (token, _margin([entry.logprob for entry in logprobs.values()]))
                for token, logprobs in zip(sample.token_ids, sample.logprobs or [], strict=True)
            ]
            for sample in (output.outputs[0] for output in outputs)
        ]

    def serve(self, workload: Sequence[TimedRequest], watcher: Watcher) -> Run:
        """Serve ``workload``; each step's tokens count from the step's end."""
        llm, clock = self._llm, self._clock
        engine = llm.engine
        llm.cache.clear()
        llm.reset_stats()
        waiting = deque(enumerate(workload))
        indices: dict[Any, int] = {}
        served = [ServedRequest(request.arrival, []) for request in workload]
        begin = clock.now()
        try:
            while watcher.num_unfinished:
                # Compared as sums: a time that was slept until has come, whatever rounding does.
                while waiting and begin + waiting[0][1].arrival <= clock.now():
                    index, due = waiting.popleft()
                    request = llm.request(due.prompt, _params(due))
                    indices[request] = index
                    engine.add([request])
                if not indices:
                    clock.sleep_until(begin + waiting[0][1].arrival)
                    continue
                news = engine.step()
                clock.tick()
                now = clock.now() - begin
                for request in news:
                    if request.error is not None:
                        raise request.error
                    request.pieces.clear()
                    times = served[indices[request]].token_times
                    num_new = len(request.output.outputs[0].token_ids) - len(times)
                    times.extend([now] * num_new)
                    if request.finished:
                        watcher.finished(indices.pop(request), now)
                watcher.check(now)
        finally:
            engine.abort(list(indices))
            engine.settle()
        stats = llm.stats
        return Run(
            served, stats.peak_kv_bytes, stats.peak_num_seqs, stats.num_prompt_tokens_computed
        )


def _params(request: TimedRequest, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True, logprobs=logprobs)


def _margin(logprobs: list[float]) -> float:
    best, second, *_ = sorted(logprobs, reverse=True)
    return best - second
