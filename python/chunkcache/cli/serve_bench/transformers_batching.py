"""transformers' own continuous batching as a contender of the benchmark."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import transformers

from chunkcache.cli.serve_bench.contenders import ServerLimits
from chunkcache.cli.serve_bench.metrics import Run, ServedRequest
from chunkcache.cli.serve_bench.watch import Watcher
from chunkcache.cli.serve_bench.workload import TimedRequest
from chunkcache.errors import ChunkCacheError

# How long to wait for an answer before looking at arrivals and limits again. It is short beside a
# step, and waiting takes the server nothing.
_POLL_SECONDS = 0.005


class ContinuousBatching:
    """``ContinuousBatchingManager``, which is what ``generate_batch`` runs on.

    It serves in a thread of its own and stamps its tokens itself, on `time.perf_counter`. A manager
    is made for each run, so that each begins with an empty cache. Prefix caching is on, as it is
    by default. Of attention implementations it takes the best that is installed: FlashAttention 3
    or 2, else PyTorch's.
    """

    def __init__(self, model: Any, limits: ServerLimits) -> None:
        """Serve a loaded model."""
        self.name = "transformers"
        self._model = model
        self._limits = limits

    def close(self) -> None:
        """Do nothing: a run's memory is given back at its end."""

    def generate(self, requests: Sequence[TimedRequest]) -> list[list[int]]:
        """Return the greedy continuations of ``requests``."""
        with self._manager(_Peaks()) as manager:
            for index, request in enumerate(requests):
                _submit(manager, index, request)
            tokens: dict[int, list[int]] = {}
            while len(tokens) < len(requests):
                result = _next_result(manager)
                if result is not None:
                    tokens[int(result.request_id)] = result.generated_tokens
        return [tokens[index] for index in range(len(requests))]

    def serve(self, workload: Sequence[TimedRequest], watcher: Watcher) -> Run:
        """Serve ``workload``."""
        waiting = deque(enumerate(workload))
        times: dict[int, list[float]] = {}
        peaks = _Peaks()
        with self._manager(peaks) as manager:
            begin = time.perf_counter()
            while watcher.num_unfinished:
                now = time.perf_counter() - begin
                while waiting and waiting[0][1].arrival <= now:
                    _submit(manager, *waiting.popleft())
                result = _next_result(manager)
                if result is not None:
                    index = int(result.request_id)
                    times[index] = [stamp - begin for stamp in result.timestamps]
                    watcher.finished(index, times[index][-1])
                watcher.check(time.perf_counter() - begin)
        served = [ServedRequest(r.arrival, times[index]) for index, r in enumerate(workload)]
        return Run(served, peaks.kv_bytes, peaks.batch)

    @contextmanager
    def _manager(self, peaks: _Peaks) -> Iterator[Any]:
        generation: Any = transformers.generation
        config = generation.ContinuousBatchingConfig(
            num_blocks=self._limits.capacity,
            max_batch_tokens=self._limits.max_num_batched_tokens,
            max_requests_per_batch=self._limits.max_num_seqs,
            **{_page_size_name(): self._limits.chunk_size},
        )
        # -1: no token ends a text.
        greedy = generation.GenerationConfig(do_sample=False, eos_token_id=-1)
        manager = self._model.init_continuous_batching(
            generation_config=greedy, continuous_batching_config=config
        )
        # Its pool is made on the first step; that is no part of anybody's latency.
        manager.warmup()
        step = manager._generation_step

        def watched_step() -> None:
            peaks.note(manager.batch_processor)
            step()

        manager._generation_step = watched_step
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=True, hard_stop=True)
            manager.destroy()


class _Peaks:
    """The most that was in use in any step."""

    def __init__(self) -> None:
        self.kv_bytes = 0
        self.batch = 0

    def note(self, processor: Any) -> None:
        """Look at a step that is about to run."""
        self.kv_bytes = max(self.kv_bytes, bytes_in_use(processor.cache))
        self.batch = max(self.batch, len(processor.scheduler.active_requests))


def _page_size_name() -> str:
    """Return what the page size is called in the configuration: it was renamed in 5.18."""
    generation: Any = transformers.generation
    names = signature(generation.ContinuousBatchingConfig).parameters
    return "page_size" if "page_size" in names else "block_size"


def bytes_in_use(cache: Any) -> int:
    """Return the bytes of K and V of running requests.

    What is kept for reuse by nobody who runs does not count, as it does not with us.
    """
    if not hasattr(cache, "cache_allocators"):
        # Before 5.18; what is kept for reuse counts as free.
        stored = sum(tensor.nbytes for tensor in [*cache.key_cache, *cache.value_cache])
        # Two more blocks are for padding.
        bytes_per_block = stored // (cache.num_blocks + 2)
        return int((cache.num_blocks - cache.get_num_free_blocks()) * bytes_per_block)
    in_use = cache.num_sectors * cache.bytes_per_sector
    in_use -= cache.compute_free_capacity(relative=False)
    for allocator in cache.cache_allocators.values():
        in_use -= len(allocator.ledger.cached_blocks) * allocator.bytes_per_block
    return int(in_use)


def _submit(manager: Any, index: int, request: TimedRequest) -> None:
    manager.add_request(
        request.prompt,
        request_id=str(index),
        max_new_tokens=request.num_output_tokens,
        record_timestamps=True,
    )


def _next_result(manager: Any) -> Any | None:
    """Return an answer, or None if there is none yet."""
    result = manager.get_result(timeout=_POLL_SECONDS)
    if result is None:
        if not manager.is_running():
            raise ChunkCacheError(
                "transformers' continuous batching stopped: "
                f"{manager.background_thread_status.fatal_error}"
            )
    elif result.error is not None:
        raise ChunkCacheError(f"transformers' continuous batching failed: {result.error}")
    return result
