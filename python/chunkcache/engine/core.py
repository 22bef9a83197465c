"""The engine's loop: plan the next step, take in the tokens of the last, let the finished go."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from chunkcache.engine.executor import ModelStepError, RunningStep, StepExecutor, StepResult, named
from chunkcache.engine.fair_lock import FairLock
from chunkcache.engine.scheduler import Scheduler
from chunkcache.engine.sequence import NO_HANDLE, Request, Sequence, Status
from chunkcache.engine.stats import EngineStats
from chunkcache.engine.step import PlannedStep, find_culprits, plan_step
from chunkcache.errors import ChunkCacheError, EngineError, OutOfChunksError

# One step runs while the next one waits for its end; further ones would be planned on more tokens
# that nobody knows.
_MAX_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was handed over."""

    planned: PlannedStep
    running: RunningStep


class Engine:
    """Runs requests together. Its methods may be called from several threads.

    Each call of `step` plans the step after the one that runs, whose tokens are not known yet, then
    waits for the one that runs and takes in its tokens, while the executor runs the planned one.
    What is decided does not depend on whether the executor has a thread: results are equal bit for
    bit.
    A sequence that ends by a token of its own (not by its length) is in one more step; what
    that gives for it is thrown away.
    """

    def __init__(
        self,
        executor: StepExecutor,
        scheduler: Scheduler,
        *,
        chunk_bytes: int,
    ) -> None:
        """Start with no requests."""
        self._executor = executor
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._chunk_bytes = chunk_bytes
        self._requests: dict[int, Request] = {}
        self._next_number = 0
        self._flights: deque[_Flight] = deque()
        self._last_end: float | None = None
        self._news: dict[int, Request] = {}
        self._lock = FairLock()
        # Aborted, but not taken out yet.
        self._abandoned: deque[Request] = deque()
        self.stats = EngineStats()

    @property
    def num_unfinished(self) -> int:
        """Return how many requests are waiting or running."""
        return len(self._requests)

    def add(self, requests: Iterable[Request]) -> None:
        """Take requests in, in their order; they begin with the next step."""
        with self._exclusively():
            if not self._requests:
                self._last_end = None
            for request in requests:
                request.number = self._next_number
                self._next_number += 1
                self._requests[request.number] = request
                self._scheduler.add(request)

    def abort(self, requests: Iterable[Request]) -> None:
        """Take out what is unfinished of ``requests`` and give its chunks back.

        If another call is in progress, that call does it before it returns: the garbage collector
        may close a stream in the middle of a step, so nothing waits for the engine here. Chunks
        that a step in flight writes follow when it ends; if no request is left, that is awaited.
        """
        self._abandoned.extend(requests)
        self._drop_abandoned()
        if not self._requests and self._flights and self._lock.try_acquire():
            try:
                self._settle()
            finally:
                self._lock.release()
            self._drop_abandoned()

    def step(self) -> list[Request]:
        """Plan a step and take in the tokens of another, if there is anything to do.

        Returns:
            The requests that have something new: output pieces, their end, or an error. A request
            that the pool cannot hold, or for which the planner, the sampler or the text fails, gets
            its error set, and the others go on.

        Raises:
            EngineError: the model failed, or the planning of a step, but for none of its requests
                alone. Every request of the engine has got this error then; new ones may be added.
        """
        with self._exclusively():
            try:
                self._fill_pipeline()
                if self._flights:
                    self._finish_step()
                elif self._requests and not self._news:
                    raise EngineError("requests are left, but none of them can be scheduled")
            except ModelStepError as error:
                raise self._fail(str(error), error.__cause__) from error.__cause__
            except Exception as error:
                message = f"planning or ending a step failed: {named(error)}"
                raise self._fail(message, error) from error
            except BaseException as error:
                self._fail(f"the engine was interrupted: {named(error)}", error)
                raise
            news, self._news = self._news, {}
            return list(news.values())

    def fail(self, reason: str) -> None:
        """End every request with an error, for a reason that lies outside of this engine."""
        with self._exclusively():
            self._fail(reason, None)

    def settle(self) -> None:
        """If no request is left, wait for a step in flight, so that all chunks are given back."""
        with self._exclusively():
            self._settle()

    def check_accounts(self) -> None:
        """Check the cache's invariants, and that no chunk is lost when nothing runs.

        Raises:
            ChunkCacheError: free + evictable + pinned chunks are not the capacity although no
                request is left, or sequences are left in the cache that belong to none.
        """
        with self._exclusively():
            self._settle()
            self._cache.check_invariants()
            stats = self._cache.stats()
            num_running = len(self._scheduler.running)
            if not self._flights and stats.num_sequences != num_running:
                raise ChunkCacheError(
                    f"the cache has {stats.num_sequences} sequences, the engine runs {num_running}"
                )
            if self._requests:
                return
            num_kept = stats.num_free + stats.num_evictable + stats.num_pinned
            if num_kept != stats.capacity or self._scheduler.running or self._scheduler.waiting:
                raise ChunkCacheError(
                    f"nothing runs, but {stats.num_free} free, {stats.num_evictable} evictable and "
                    f"{stats.num_pinned} pinned chunks are not the capacity of {stats.capacity}"
                )

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        with self._lock:
            self._drop_all(self._abandoned)
            try:
                yield
            finally:
                self._drop_all(self._abandoned)
        # What was abandoned in this moment found the lock taken.
        self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        while self._abandoned and self._lock.try_acquire():
            try:
                self._settle()
            finally:
                self._lock.release()

    def _fill_pipeline(self) -> None:
        while len(self._flights) < _MAX_IN_FLIGHT:
            items = self._scheduler.schedule(bool(self._flights))
            self._end_failed()
            if not items:
                return
            try:
                before = self._flights[-1].planned if self._flights else None
                planned = plan_step(self._cache, items, self._scheduler.sharing, before)
            except Exception as error:
                culprits = find_culprits(self._cache, items, self._scheduler.sharing)
                if not culprits:
                    raise error
                for item, own in culprits:
                    request = item.sequence.request
                    self._end_with(request, _failure_of(request, own))
                continue
            self._note_peaks()
            try:
                running = self._executor.submit(planned.step)
            except BaseException:
                planned.step.plan.close()
                raise
            self._flights.append(_Flight(planned, running))

    def _finish_step(self) -> None:
        # It stays in its place until it is through, whatever interrupts the waiting.
        result = self._flights[0].running.result()
        planned = self._flights.popleft().planned
        # Here and not in the executor: what the tree knows when the next step is planned must not
        # depend on how fast this one was.
        with planned.step.plan as plan:
            self._cache.commit(plan)
        is_wanted = False
        for (sequence, num_tokens), num_prompt_rows in zip(
            planned.scheduled, planned.num_prompt_rows, strict=True
        ):
            if num_prompt_rows:
                sequence.request.output.num_computed_prompt_tokens += num_prompt_rows
            if sequence.status is Status.RUNNING:
                sequence.num_committed += num_tokens
                is_wanted = True
        for index, error in result.prompt_errors.items():
            request = planned.step.prompt_rows[index].sequence.request
            if request.number in self._requests:
                self._end_with(request, _failure_of(request, error))
        num_taken = self._take_tokens(planned.picking, result)
        self._end_failed()
        self._count_step(planned, result, num_taken)
        # What is computed for nobody may end long before the next work comes.
        self._last_end = result.end if is_wanted and self._requests else None

    def _take_tokens(self, picking: Iterable[Sequence], result: StepResult) -> int:
        """Hand the tokens of a step to their sequences, and return how many still wanted them."""
        going_on: list[Sequence] = []
        ended: list[Sequence] = []
        num_taken = 0
        now = time.perf_counter()
        for index, sequence in enumerate(picking):
            if sequence.status is Status.FINISHED:
                continue
            sequence.num_pending -= 1
            try:
                if index in result.errors:
                    raise result.errors[index]
                self._accept(sequence, index, result, now)
            except Exception as error:
                self._end_with(sequence.request, _failure_of(sequence.request, error))
                continue
            num_taken += 1
            if sequence.output.finish_reason is not None:
                ended.append(sequence)
            elif sequence.status is Status.RUNNING:
                going_on.append(sequence)
            elif (leader := sequence.request.leader).status is Status.RUNNING:
                self._scheduler.fork(leader, sequence)
        # A sample of a request that has failed meanwhile is not running any more.
        self._scheduler.fill(
            [seq for seq in going_on if seq.handle != NO_HANDLE and seq.num_slots >= seq.num_tokens]
        )
        for sequence in ended:
            self._end(sequence)
        return num_taken

    def _accept(self, sequence: Sequence, index: int, result: StepResult, now: float) -> None:
        request = sequence.request
        piece = sequence.accept(
            result.tokens[index],
            result.logprobs[index],
            completes=index in result.completes,
            now=now,
        )
        if math.isnan(request.output.time_to_first_token):
            request.output.time_to_first_token = sequence.output.token_times[-1]
        if piece is not None:
            request.pieces.append(piece)
        self._news[request.number] = request

    def _end(self, sequence: Sequence) -> None:
        request = sequence.request
        if sequence.status is not Status.FINISHED:
            self._scheduler.remove(sequence)
        if request.finished and request.number in self._requests:
            request.output.latency = sequence.output.token_times[-1]
            del self._requests[request.number]

    def _end_failed(self) -> None:
        for request, error in self._scheduler.take_failed():
            is_plain = isinstance(error, OutOfChunksError)
            self._end_with(request, error if is_plain else _failure_of(request, error))

    def _end_with(self, request: Request, error: Exception) -> None:
        request.error = error
        self._news[request.number] = request
        self._drop(request)

    def _drop(self, request: Request) -> None:
        if self._requests.pop(request.number, None) is not None:
            self._scheduler.drop(request)

    def _drop_all(self, requests: deque[Request]) -> None:
        while requests:
            self._drop(requests.popleft())

    def _settle(self) -> None:
        self._drop_all(self._abandoned)
        if not self._requests:
            self._last_end = None
            self._await_flights()
            self._executor.recover()
            self._scheduler.give_back()
            # Nobody is left to be told.
            self._scheduler.take_failed()

    def _await_flights(self) -> None:
        # Whoever wanted their tokens is gone, or has got the first error.
        while self._flights:
            failed = False
            try:
                self._flights[0].running.result()
            except ModelStepError:
                failed = True
            with self._flights.popleft().planned.step.plan as plan, suppress(Exception):
                if not failed:
                    self._cache.commit(plan)

    def _fail(self, what: str, cause: BaseException | None) -> EngineError:
        """End every request with an error, and be ready for new ones."""
        message = f"{what}; this ended all {len(self._requests)} requests of the engine"
        for request in list(self._requests.values()):
            # Whatever fails on the way out must not keep the others from being told.
            with suppress(Exception):
                self._end_with(request, _caused(message, cause))
        self._await_flights()
        self._executor.recover()
        self._scheduler.take_failed()
        self._news = {}
        return _caused(message, cause)

    def _note_peaks(self) -> None:
        num_in_use = self._cache.stats().num_in_use
        stats = self.stats
        stats.peak_kv_bytes = max(stats.peak_kv_bytes, num_in_use * self._chunk_bytes)
        stats.peak_num_seqs = max(stats.peak_num_seqs, len(self._scheduler.running))

    def _count_step(self, planned: PlannedStep, result: StepResult, num_taken: int) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.num_prompt_tokens_computed += sum(planned.num_prompt_rows)
        stats.num_generated_tokens += num_taken
        stats.num_preemptions = self._scheduler.num_preemptions
        begin = result.begin
        if self._last_end is not None:
            begin = self._last_end
            stats.num_step_gaps += 1
            stats.step_gap_seconds += result.begin - begin
        if planned.decoding_only:
            stats.num_decode_steps += 1
            stats.num_decode_tokens += num_taken
            stats.decode_seconds += result.end - begin


def _failure_of(request: Request, error: Exception) -> EngineError:
    return _caused(f"request {request.output.request_id!r} failed: {named(error)}", error)


def _caused(message: str, cause: BaseException | None) -> EngineError:
    """Return a new error for each that gets it: raising one writes its traceback into it."""
    error = EngineError(message)
    error.__cause__ = cause
    return error
