"""Decides which tokens the next step computes.

Sequences join and leave between steps. Those that decode go first, with one token each; what is
left of the token budget goes to prompts, in pieces where it must: first those that have a place,
in the order in which they got it, then those that wait, by class and age (`WaitingQueue`). Once a
sequence has a place, every step gives it a token of the budget at least.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from chunkcache import ChunkCache, PrefixMatch
from chunkcache.engine.sequence import Request, Sequence, Status
from chunkcache.engine.step import ScheduledSequence
from chunkcache.engine.waiting import WaitingQueue
from chunkcache.errors import OutOfChunksError


class Scheduler:
    """Owns the sequences' places in the cache.

    What goes wrong with one request ends that one alone: it is dropped, and `take_failed` tells.
    """

    def __init__(
        self,
        cache: ChunkCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill: bool = True,
        sharing: bool = True,
    ) -> None:
        """Start with nothing to do.

        Args:
            cache: holds the sequences.
            max_num_seqs: most sequences with a place.
            max_num_batched_tokens: most tokens of a step.
            chunked_prefill: False computes every prompt in one step, which waits for its turn.
            sharing: whether ``cache`` shares prefixes.
        """
        self.cache = cache
        self.sharing = sharing
        # Every sequence with a place takes a token of the budget.
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._chunked_prefill = chunked_prefill
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._failed: list[tuple[Request, Exception]] = []
        # Handles of sequences that have left, but are still in the cache.
        self._left: list[int] = []

    def take_failed(self) -> list[tuple[Request, Exception]]:
        """Return the requests that were dropped since the last call, and why.

        `OutOfChunksError` is for those that the pool cannot hold although no other is in the way.
        """
        failed, self._failed = self._failed, []
        return failed

    def add(self, request: Request) -> None:
        """Queue all samples of ``request``."""
        for sequence in request.sequences:
            self.waiting.add(sequence)

    def schedule(self, step_in_flight: bool) -> list[ScheduledSequence]:
        """Choose the sequences of the next step, those that decode first.

        Args:
            step_in_flight: whether a step is running whose tokens are not known yet. Where the
                pool is full nothing is chosen then: what the step ends may be enough.

        Returns:
            The sequences; none if there is nothing to run now.
        """
        self.give_back()
        items: list[ScheduledSequence] = []
        if not self._extend(step_in_flight):
            return items
        prompts: list[Sequence] = []
        for sequence in self.running:
            if sequence.decoding:
                items.append(ScheduledSequence(sequence, 1))
            else:
                prompts.append(sequence)
        budget = self._max_num_batched_tokens - len(items)
        budget = self._continue_prompts(prompts, budget, items)
        self._admit(budget, step_in_flight, items)
        if self._failed:
            items = [item for item in items if item.sequence.status is Status.RUNNING]
        return items

    def fork(self, leader: Sequence, sequence: Sequence) -> None:
        """Let a waiting sample go on from the prompt of ``leader``, if there is room now.

        The sample has its first token; ``leader`` has not got its own into the cache yet.
        """
        if len(self.running) >= self._max_num_seqs:
            return
        try:
            forked = self.cache.fork(leader.handle)
        except OutOfChunksError:
            return
        except Exception as error:
            self._fail(sequence.request, error)
            return
        self._start(sequence, forked.seq, leader.num_committed)
        sequence.num_slots = leader.num_committed

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out for good and give its chunks back."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            if sequence.num_committed < sequence.num_prompt_tokens:
                self._hand_over(sequence)
            self._release(sequence)
        sequence.status = Status.FINISHED

    def drop(self, request: Request) -> None:
        """Take out all samples of ``request``."""
        for sequence in request.sequences:
            # So that none of its own samples takes the prompt over.
            if sequence.status is Status.WAITING:
                self.remove(sequence)
        for sequence in request.sequences:
            self.remove(sequence)

    def give_back(self) -> None:
        """Give back what failed to be given back when its sequence left."""
        while self._left:
            self.cache.remove(self._left[-1])
            self._left.pop()

    def _fail(self, request: Request, error: Exception) -> None:
        self._failed.append((request, error))
        self.drop(request)

    def _extend(self, step_in_flight: bool) -> bool:
        """Give every decoding sequence a slot for its newest token; False if there is no room."""
        while True:
            known: list[Sequence] = []
            unknown: list[Sequence] = []
            for seq in self.running:
                if seq.num_slots < seq.num_tokens:
                    known.append(seq)
                elif seq.num_slots < seq.length and seq.num_uncomputed:
                    unknown.append(seq)
            try:
                self._for_all(known, self._append)
                self._for_all(unknown, self._reserve)
            except OutOfChunksError as error:
                if step_in_flight:
                    return False
                self._make_room(error)
                continue
            return True

    def fill(self, sequences: list[Sequence]) -> None:
        """Give the newest token of each sequence to its slot, a reserved one or a new one."""
        self._for_all(sequences, self._append)

    def _append(self, sequences: list[Sequence]) -> None:
        tokens = np.fromiter((seq.last_token for seq in sequences), np.uint32, len(sequences))
        self.cache.append_batch([seq.handle for seq in sequences], tokens)
        for seq in sequences:
            seq.num_slots = seq.num_tokens

    def _reserve(self, sequences: list[Sequence]) -> None:
        self.cache.reserve([seq.handle for seq in sequences])
        for seq in sequences:
            seq.num_slots = seq.length

    def _for_all(
        self, sequences: list[Sequence], operation: Callable[[list[Sequence]], None]
    ) -> None:
        """Do for all sequences at once what changes all or none.

        If it fails, those end for which alone it fails too.

        Raises:
            OutOfChunksError: there is no room.
            Exception: it fails for all together, but for none of them alone.
        """
        if not sequences:
            return
        try:
            operation(sequences)
        except OutOfChunksError:
            raise
        except Exception as error:
            culprits: list[tuple[Request, Exception]] = []
            for sequence in sequences:
                try:
                    operation([sequence])
                except OutOfChunksError:
                    raise
                except Exception as own:
                    culprits.append((sequence.request, own))
            if not culprits:
                raise error
            for culprit in culprits:
                self._fail(*culprit)

    def _make_room(self, error: OutOfChunksError) -> None:
        """Set the youngest sequence of the lowest class aside; refuse it if it is the only one."""
        victim = max(self.running, key=lambda seq: (seq.rank, seq.order))
        if len(self.running) == 1:
            self._fail(victim.request, error)
            return
        # What stays of it in the cache it finds again when it resumes.
        self._release(victim)
        victim.status = Status.WAITING
        self.waiting.add(victim)
        self.num_preemptions += 1

    def _continue_prompts(
        self, prompts: list[Sequence], budget: int, items: list[ScheduledSequence]
    ) -> int:
        """Take the next pieces of those with a place; return what is left of the budget."""
        for sequence in prompts:
            if budget <= 0:
                break
            try:
                if not self._is_ready(sequence):
                    continue
            except Exception as error:
                self._fail(sequence.request, error)
                continue
            num_tokens = min(sequence.num_uncomputed, budget)
            if num_tokens < sequence.num_uncomputed and not self._chunked_prefill:
                return 0
            items.append(ScheduledSequence(sequence, num_tokens))
            budget -= num_tokens
        return budget

    def _is_ready(self, sequence: Sequence) -> bool:
        """Tell whether a sequence that has a prompt to compute can go on with it."""
        if not sequence.num_uncomputed:
            return False
        if sequence.adopted:
            info = self.cache.sequence(sequence.handle)
            sequence.num_scheduled = info.num_scheduled_tokens
            sequence.num_committed = info.num_computed_tokens
            sequence.adopted = not info.is_ready
        return not sequence.adopted

    def _admit(self, budget: int, step_in_flight: bool, items: list[ScheduledSequence]) -> None:
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._max_num_seqs:
                return
            if sequence.status is not Status.WAITING or self._is_about_to_fork(sequence):
                continue
            alone = not self.running and not step_in_flight
            try:
                match = self.cache.match_prefix(sequence.tokens, sequence.request.cache_salt)
                if not alone and self._is_worth_waiting(sequence, match):
                    continue
                if not self._fits_now(sequence, match, budget):
                    return
                self._insert(sequence, match)
            except OutOfChunksError as error:
                if not alone:
                    return
                self._fail(sequence.request, error)
                continue
            except Exception as error:
                self._fail(sequence.request, error)
                continue
            num_tokens = min(sequence.num_uncomputed, budget)
            if num_tokens < sequence.num_uncomputed and not self._chunked_prefill:
                return
            items.append(ScheduledSequence(sequence, num_tokens))
            budget -= num_tokens

    def _fits_now(self, sequence: Sequence, match: PrefixMatch, budget: int) -> bool:
        """Tell whether there is room for ``sequence`` in the step and beside those that run."""
        cached = min(match.num_filled + match.num_partial, sequence.num_tokens - 1)
        if sequence.num_tokens - cached > budget and not self._chunked_prefill:
            return False
        return not self.running or self._leaves_room_to_decode(sequence, match.num_filled)

    def _is_about_to_fork(self, sequence: Sequence) -> bool:
        """Tell whether ``sequence`` gets its first token with the prompt of its first sample."""
        leader = sequence.request.leader
        return bool(sequence.num_pending) or (
            self.sharing
            and leader is not sequence
            and leader.status is Status.RUNNING
            and not leader.output.token_ids
        )

    def _is_worth_waiting(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Tell whether somebody else is about to compute what ``sequence`` needs."""
        return match.num_tokens > match.num_filled or (
            self.sharing and any(self._will_have(other, sequence) for other in self.running)
        )

    def _will_have(self, other: Sequence, sequence: Sequence) -> bool:
        """Tell whether ``other`` computes all that ``sequence`` needs but its last token."""
        end = sequence.num_tokens - 1
        return (
            other.num_committed < end <= other.num_tokens
            and other.request.cache_salt == sequence.request.cache_salt
            and np.array_equal(other.tokens[:end], sequence.tokens[:end])
        )

    def _leaves_room_to_decode(self, sequence: Sequence, num_cached: int) -> bool:
        """Tell whether, beside ``sequence``, each running sequence can still take a chunk.

        Admitting into the last chunks would preempt the newcomer at once.
        """
        stats = self.cache.stats()
        chunk_size = self.cache.chunk_size
        num_new = -(-sequence.num_tokens // chunk_size) - num_cached // chunk_size
        return bool(num_new + len(self.running) <= stats.num_free + stats.num_evictable)

    def _insert(self, sequence: Sequence, match: PrefixMatch) -> None:
        request = sequence.request
        inserted = self.cache.insert(sequence.tokens, request.cache_salt)
        self._start(sequence, inserted.seq, inserted.num_computed_tokens)
        collected = request.prompt_logprobs
        if sequence is request.leader and collected is not None and not collected.is_complete:
            # The logits of cached rows are needed too: they are run as queries, without a write.
            num_computed = min(inserted.num_computed_tokens, collected.next_position)
            self.cache.rewind(inserted.seq, num_computed)
            sequence.enter(inserted.seq, num_computed)
        if sequence is request.leader and not sequence.output.token_ids:
            # What others have begun but not written, somebody has to compute.
            num_unwritten = match.num_tokens - match.num_filled
            request.output.cached_tokens = inserted.cached_tokens - num_unwritten

    def _start(self, sequence: Sequence, handle: int, num_computed: int) -> None:
        self.waiting.admit(sequence)
        sequence.enter(handle, num_computed)
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def _hand_over(self, sequence: Sequence) -> None:
        """Let one that waits for the prompt of ``sequence``, which is leaving, take it over.

        It joins before the other leaves, and so inherits what is computed to the last token.
        """
        if not self.sharing:
            return
        for heir in list(self.waiting):
            if heir.request.cache_salt != sequence.request.cache_salt or heir.num_pending:
                continue
            if heir.request.prompt_logprobs is not None:
                # It computes the whole prompt anyway.
                continue
            try:
                match = self.cache.match_prefix(heir.tokens, heir.request.cache_salt)
                if match.num_tokens == match.num_filled and not self._will_have(sequence, heir):
                    continue
                self._insert(heir, match)
            except OutOfChunksError:
                return
            except Exception as error:
                self._fail(heir.request, error)
                continue
            heir.adopted = True
            return

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._left.append(sequence.handle)
        sequence.leave()
        try:
            self.give_back()
        except Exception as error:
            # The next schedule tries it again.
            self._failed.append((sequence.request, error))
