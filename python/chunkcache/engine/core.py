"""The engine's loop: schedule, compute, pick tokens, let finished sequences go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from chunkcache.engine.logprobs import Logprob
from chunkcache.engine.picker import Pick, TokenPicker
from chunkcache.engine.runner import ModelRunner, StepInput
from chunkcache.engine.scheduler import ScheduledSequence, Scheduler
from chunkcache.engine.sequence import Request, Sequence, Status
from chunkcache.errors import OutOfChunksError


@dataclass
class EngineStats:
    """What an engine has done since it began, or since `LLM.reset_stats`.

    Attributes:
        num_steps: forward passes.
        num_prompt_tokens_computed: rows of prompts that were run through the model.
        num_generated_tokens: tokens picked.
        num_preemptions: sequences set aside because the pool was full.
        num_decode_steps: those of the steps that computed no prompt.
        num_decode_tokens: tokens that came from those.
        decode_seconds: time of those.
        peak_kv_bytes: most bytes of K/V held by live sequences at once.
    """

    num_steps: int = 0
    num_prompt_tokens_computed: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_decode_steps: int = 0
    num_decode_tokens: int = 0
    decode_seconds: float = 0.0
    peak_kv_bytes: int = 0


class Engine:
    """Runs requests together. Its methods may be called from several threads."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        chunk_bytes: int,
    ) -> None:
        """Start with no requests."""
        self._runner = runner
        self._scheduler = scheduler
        self._picker = TokenPicker()
        self._chunk_bytes = chunk_bytes
        self._requests: list[Request] = []
        self._lock = threading.RLock()
        self.stats = EngineStats()

    def add(self, requests: Iterable[Request]) -> None:
        """Take requests in; they begin with the next step."""
        with self._lock:
            for request in requests:
                self._requests.append(request)
                self._scheduler.add(request)

    def abort(self, requests: Iterable[Request]) -> None:
        """Take out what is unfinished of ``requests`` and give its chunks back."""
        with self._lock:
            for request in requests:
                self._drop(request)

    def step(self) -> None:
        """Run one step; the output pieces are added to the requests.

        A request that the pool cannot hold gets its error set. Any other error fails every
        request of the engine, since the state of the step is lost, and is raised.
        """
        with self._lock:
            try:
                self._step()
            except BaseException as error:
                for request in list(self._requests):
                    request.error = error
                    self._drop(request)
                raise

    def _step(self) -> None:
        begin = time.perf_counter()
        try:
            scheduled = self._scheduler.schedule()
        except OutOfChunksError as error:
            stuck = (self._scheduler.running or self._scheduler.waiting)[0].request
            stuck.error = error
            self._drop(stuck)
            return
        if not scheduled:
            return
        num_in_use = self._runner.cache.stats().num_in_use
        self.stats.peak_kv_bytes = max(self.stats.peak_kv_bytes, num_in_use * self._chunk_bytes)
        decoding_only = all(item.sequence.decoding for item in scheduled)
        logits = self._runner.run(_step_input(scheduled))
        self._count_prompt_rows(scheduled)
        ready = [item.sequence for item in scheduled if item.completes]
        self._collect_prompt_logprobs(scheduled, logits[len(ready) :])
        for item in scheduled:
            item.sequence.num_computed += item.num_tokens
        num_generated = self._pick_tokens(ready, logits)
        self._update_stats(num_generated, decoding_only, time.perf_counter() - begin)

    def _count_prompt_rows(self, scheduled: list[ScheduledSequence]) -> None:
        for item in scheduled:
            sequence = item.sequence
            if not sequence.decoding:
                num_left = sequence.request.num_prompt_tokens - sequence.num_computed
                num_rows = max(0, min(item.num_tokens, num_left))
                sequence.request.output.num_computed_prompt_tokens += num_rows
                self.stats.num_prompt_tokens_computed += num_rows

    def _collect_prompt_logprobs(
        self, scheduled: list[ScheduledSequence], logits: torch.Tensor
    ) -> None:
        """Hand out the ``logits`` of prompt rows, which stand in the order of the sequences."""
        begin = 0
        for item in scheduled:
            request = item.sequence.request
            positions = item.prompt_positions
            if positions and request.prompt_logprobs is not None:
                end = begin + len(positions)
                request.prompt_logprobs.add(logits[begin:end], request.tokenizer)
                begin = end

    def _pick_tokens(self, ready: list[Sequence], logits: torch.Tensor) -> int:
        """Pick a token for each of ``ready`` by its row, and for the samples that fork from it."""
        picks = [Pick(row, sequence.state) for row, sequence in enumerate(ready)]
        for row, sequence in enumerate(ready[:]):
            for sibling in _waiting_siblings(sequence):
                if self._scheduler.fork(sequence, sibling):
                    ready.append(sibling)
                    picks.append(Pick(row, sibling.state))
        if not picks:
            return 0
        picked = self._picker.pick(logits, picks)
        for error in picked.errors.values():
            raise error
        tokens = picked.tokens.tolist()
        for sequence, token, logprobs in zip(ready, tokens, picked.logprobs, strict=True):
            self._accept(sequence, token, logprobs)
        return len(ready)

    def _accept(self, sequence: Sequence, token: int, logprobs: dict[int, Logprob] | None) -> None:
        request = sequence.request
        now = time.perf_counter() - request.arrival
        if not any(seq.output.token_ids for seq in request.sequences):
            request.output.time_to_first_token = now
        piece = sequence.accept(token, logprobs)
        request.pieces.append(piece)
        if piece.finish_reason is not None:
            self._scheduler.remove(sequence)
            if request.finished:
                request.output.latency = now
                self._requests.remove(request)

    def _drop(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self._scheduler.remove(sequence)
        if request in self._requests:
            self._requests.remove(request)

    def _update_stats(self, num_generated: int, decoding_only: bool, seconds: float) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.num_generated_tokens += num_generated
        stats.num_preemptions = self._scheduler.num_preemptions
        if decoding_only:
            stats.num_decode_steps += 1
            stats.num_decode_tokens += num_generated
            stats.decode_seconds += seconds


def _step_input(scheduled: list[ScheduledSequence]) -> StepInput:
    pieces = [
        item.sequence.tokens[item.sequence.num_computed :][: item.num_tokens] for item in scheduled
    ]
    ends = list(accumulate(item.num_tokens for item in scheduled))
    wanted_rows = [end - 1 for item, end in zip(scheduled, ends, strict=True) if item.completes]
    for item, end in zip(scheduled, ends, strict=True):
        first_row = end - item.num_tokens - item.sequence.num_computed
        wanted_rows += [first_row + position for position in item.prompt_positions]
    return StepInput(
        handles=[item.sequence.handle for item in scheduled],
        token_ids=np.concatenate(pieces).astype(np.int64),
        qo_indptr=np.array([0, *ends], dtype=np.int32),
        logits_rows=np.array(wanted_rows, dtype=np.int64),
    )


def _waiting_siblings(sequence: Sequence) -> list[Sequence]:
    """Return the samples that could fork from ``sequence``, which has just computed its prompt."""
    request = sequence.request
    if sequence is not request.leader or sequence.output.token_ids:
        return []
    return [seq for seq in request.sequences if seq.status is Status.WAITING]
