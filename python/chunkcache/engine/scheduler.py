"""Decides which tokens the next step computes.

Sequences join and leave between steps. Those that decode go first, with one token each; what is
left of the token budget goes to prompts, oldest first, whole or in pieces.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from chunkcache import ChunkCache
from chunkcache.engine.sequence import NO_HANDLE, Request, Sequence, Status
from chunkcache.errors import OutOfChunksError

_by_age = attrgetter("order")


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence and how many of its uncomputed tokens the step computes."""

    sequence: Sequence
    num_tokens: int

    @property
    def completes(self) -> bool:
        """Whether the step leaves no token of the sequence uncomputed, so that one is picked."""
        return self.num_tokens == self.sequence.num_uncomputed

    @property
    def prompt_positions(self) -> range:
        """The positions whose logits are needed for log-probabilities of the prompt."""
        collected = self.sequence.request.prompt_logprobs
        if collected is None or self.sequence is not self.sequence.request.leader:
            return range(0)
        begin = self.sequence.num_computed
        return collected.wanted(begin, begin + self.num_tokens)


class Scheduler:
    """Owns the sequences' places in the cache."""

    def __init__(
        self, cache: ChunkCache, *, max_num_seqs: int, max_num_batched_tokens: int, sharing: bool
    ) -> None:
        """Start with nothing to do."""
        self._cache = cache
        # Every decoding sequence takes a token of the budget.
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._sharing = sharing
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue all samples of ``request``."""
        for sequence in request.sequences:
            insort(self.waiting, sequence, key=_by_age)

    def schedule(self) -> list[ScheduledSequence]:
        """Return the sequences of the next step; empty if there is nothing to run.

        Raises:
            OutOfChunksError: the pool cannot hold the oldest sequence although no other runs.
        """
        self._append_decoded()
        decoding = [seq for seq in self.running if seq.decoding]
        step = [ScheduledSequence(seq, 1) for seq in decoding]
        budget = self._max_num_batched_tokens - len(step)
        for sequence in self.running:
            if budget > 0 and not sequence.decoding:
                step.append(ScheduledSequence(sequence, min(sequence.num_uncomputed, budget)))
                budget -= step[-1].num_tokens
        step.extend(self._admit(budget))
        return step

    def fork(self, leader: Sequence, sequence: Sequence) -> bool:
        """Let a waiting sample begin where ``leader`` stands; False if there is no room now."""
        if not self._sharing or len(self.running) >= self._max_num_seqs:
            return False
        try:
            forked = self._cache.fork(leader.handle)
        except OutOfChunksError:
            return False
        self._start(sequence, forked.seq, leader.num_computed)
        return True

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out for good and give its chunks back."""
        self._release(sequence)
        sequence.status = Status.FINISHED

    def _append_decoded(self) -> None:
        """Give every decoding sequence a slot for its newest token, preempting if need be."""
        while True:
            behind = [seq for seq in self.running if seq.num_in_tree < seq.num_tokens]
            if not behind:
                return
            try:
                self._cache.append_batch(
                    [seq.handle for seq in behind],
                    np.fromiter((seq.last_token for seq in behind), np.uint32, len(behind)),
                )
            except OutOfChunksError:
                if len(self.running) == 1:
                    raise
                self._preempt(self.running[-1])
                continue
            for seq in behind:
                seq.num_in_tree = seq.num_tokens

    def _admit(self, budget: int) -> list[ScheduledSequence]:
        admitted: list[ScheduledSequence] = []
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._max_num_seqs:
                break
            match = self._cache.match_prefix(sequence.tokens, sequence.request.cache_salt)
            if self.running:
                # Another sequence is computing a prefix of this one: waiting spares the work.
                if match.num_tokens > match.num_filled or self._leader_is_ahead(sequence):
                    continue
                if not self._leaves_room_to_decode(sequence, match.num_filled):
                    break
            if not self._insert(sequence):
                break
            admitted.append(ScheduledSequence(sequence, min(sequence.num_uncomputed, budget)))
            budget -= admitted[-1].num_tokens
        return admitted

    def _leader_is_ahead(self, sequence: Sequence) -> bool:
        """Tell whether ``sequence`` can fork from its request's first sample before long."""
        leader = sequence.request.leader
        return (
            self._sharing
            and leader is not sequence
            and leader.status is Status.RUNNING
            and not leader.output.token_ids
        )

    def _leaves_room_to_decode(self, sequence: Sequence, num_cached: int) -> bool:
        """Tell whether, beside ``sequence``, each running sequence can still take a chunk.

        Admitting into the last chunks would preempt the newcomer at once.
        """
        stats = self._cache.stats()
        chunk_size = self._cache.chunk_size
        num_new = -(-sequence.num_tokens // chunk_size) - num_cached // chunk_size
        return bool(num_new + len(self.running) <= stats.num_free + stats.num_evictable)

    def _insert(self, sequence: Sequence) -> bool:
        request = sequence.request
        try:
            inserted = self._cache.insert(sequence.tokens, request.cache_salt)
        except OutOfChunksError:
            if not self.running:
                raise
            return False
        num_computed = inserted.num_computed_tokens
        collected = request.prompt_logprobs
        if sequence is request.leader and collected is not None and not collected.is_complete:
            # The logits of cached rows are needed too: they are run as queries, without a write.
            num_computed = min(num_computed, collected.next_position)
            self._cache.rewind(inserted.seq, num_computed)
        self._start(sequence, inserted.seq, num_computed)
        if sequence is request.leader and not sequence.output.token_ids:
            request.output.cached_tokens = inserted.cached_tokens
        return True

    def _start(self, sequence: Sequence, handle: int, num_computed: int) -> None:
        sequence.handle = handle
        sequence.num_computed = num_computed
        sequence.num_in_tree = sequence.num_tokens
        sequence.status = Status.RUNNING
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_by_age)

    def _preempt(self, sequence: Sequence) -> None:
        """Set a sequence aside; what stays of it in the cache it finds again when it resumes."""
        self._release(sequence)
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_by_age)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            handle, sequence.handle = sequence.handle, NO_HANDLE
            sequence.num_computed = sequence.num_in_tree = 0
            # Nobody inherits work: a sequence joins only when all it shares is written.
            self._cache.remove(handle)
