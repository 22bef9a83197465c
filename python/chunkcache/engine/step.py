"""A step on its way: from what the scheduler chose to what the executor runs."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chunkcache import ChunkCache, Plan
from chunkcache.engine.lora import AdapterRows
from chunkcache.engine.picker import Pick
from chunkcache.engine.sequence import Sequence, Status


class ScheduledSequence(NamedTuple):
    """A sequence and how many of its uncomputed tokens the step computes."""

    sequence: Sequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The rows ``[begin, end)`` of a step's logits are of the prompt of ``sequence``."""

    sequence: Sequence
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Step:
    """What the executor runs.

    Attributes:
        plan: the step's plan in the cache, open.
        token_ids: int64 ``[rows]``, the new tokens of each sequence, one sequence after the other.
        pending_rows: int64 ``[pending]``, the rows whose token is one that the step before picks.
        pending_picks: int64 ``[pending]``, which of its picks each of those is.
        logits_rows: int64 ``[wanted]``, the rows whose logits are wanted.
        picks: the tokens to pick from those logits; their rows come first.
        prompt_rows: the rows of those logits that a prompt's log-probabilities need.
        adapter_rows: the rows of requests with a LoRA adapter.
    """

    plan: Plan
    token_ids: npt.NDArray[np.int64]
    pending_rows: npt.NDArray[np.int64]
    pending_picks: npt.NDArray[np.int64]
    logits_rows: npt.NDArray[np.int64]
    picks: Sequence_[Pick]
    prompt_rows: Sequence_[PromptRows]
    adapter_rows: Sequence_[AdapterRows]

    @property
    def is_decode(self) -> bool:
        """Return whether each sequence has one row."""
        return len(self.plan.qo_indptr) == len(self.token_ids) + 1

    @property
    def takes_all_rows(self) -> bool:
        """Return whether the logits of all rows are wanted, in their order."""
        return np.array_equal(self.logits_rows, np.arange(len(self.token_ids)))


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step with the sequences that it is for.

    Attributes:
        step: what the executor runs.
        scheduled: the sequences whose tokens it computes.
        num_prompt_rows: for each of those, how many of its tokens are of the prompt.
        picking: for each pick the sequence that gets the token.
        decoding_only: whether it computes no prompt, nor what was preempted once more.
    """

    step: Step
    scheduled: Sequence_[ScheduledSequence]
    num_prompt_rows: Sequence_[int]
    picking: Sequence_[Sequence]
    decoding_only: bool


def plan_step(
    cache: ChunkCache,
    scheduled: Sequence_[ScheduledSequence],
    sharing: bool,
    before: PlannedStep | None = None,
) -> PlannedStep:
    """Plan a step, and note in its sequences what it computes and picks for them.

    Args:
        cache: holds the sequences.
        scheduled: what the step computes.
        sharing: whether the samples of a prompt that wait for it get their first token with it.
        before: the step in flight that was planned last, None if there is none.
    """
    planned = _repeat(cache, scheduled, before) or _lay_out(cache, scheduled, sharing)
    for sequence, num_tokens in scheduled:
        sequence.num_scheduled += num_tokens
    for index, sequence in enumerate(planned.picking):
        sequence.last_pick = index
        sequence.num_pending += 1
    return planned


def _repeat(
    cache: ChunkCache, scheduled: Sequence_[ScheduledSequence], before: PlannedStep | None
) -> PlannedStep | None:
    """Plan what only decodes the sequences that ``before`` decodes; None if that is not all."""
    if before is None or not before.decoding_only or len(before.picking) != len(scheduled):
        return None
    for (sequence, num_tokens), picking in zip(scheduled, before.picking, strict=True):
        if sequence is not picking or num_tokens != 1 or sequence.num_pending != 1:
            return None
    step = before.step
    if len(step.logits_rows) != len(scheduled):
        return None
    plan = cache.plan([item.sequence.handle for item in scheduled])
    # Row i is of sequence i, whose token is pick i of the step before.
    rows = step.logits_rows
    token_ids = np.zeros(len(scheduled), dtype=np.int64)
    step = replace(step, plan=plan, token_ids=token_ids, pending_rows=rows, pending_picks=rows)
    return replace(before, step=step, scheduled=scheduled)


def find_culprits(
    cache: ChunkCache, scheduled: Sequence_[ScheduledSequence], sharing: bool
) -> list[tuple[ScheduledSequence, Exception]]:
    """Return those for which a step cannot be planned, and why: without them it can."""
    sound: list[ScheduledSequence] = []
    culprits: list[tuple[ScheduledSequence, Exception]] = []
    for item in scheduled:
        try:
            planned = _lay_out(cache, [*sound, item], sharing)
        except Exception as error:
            culprits.append((item, error))
        else:
            planned.step.plan.close()
            sound.append(item)
    return culprits


def _lay_out(
    cache: ChunkCache, scheduled: Sequence_[ScheduledSequence], sharing: bool
) -> PlannedStep:
    ends = list(accumulate(item.num_tokens for item in scheduled))
    one_each = len(scheduled) == ends[-1]
    handles = [item.sequence.handle for item in scheduled]
    plan = cache.plan(handles, None if one_each else [0, *ends])
    try:
        rows = _Rows(np.zeros(ends[-1], dtype=np.int64))
        for item, end in zip(scheduled, ends, strict=True):
            rows.add(item, end, sharing)
        return PlannedStep(
            rows.step(plan, _adapter_rows(scheduled)),
            scheduled,
            rows.num_prompt_rows,
            rows.picking,
            one_each and not any(rows.num_prompt_rows),
        )
    except BaseException:
        plan.close()
        raise


class _Rows:
    """The rows of a step, gathered one sequence after the other."""

    def __init__(self, token_ids: npt.NDArray[np.int64]) -> None:
        """Begin with no sequence; the executor puts in tokens that are not known yet."""
        self._token_ids = token_ids
        self._pending_rows: list[int] = []
        self._pending_picks: list[int] = []
        self._logits_rows: list[int] = []
        self._picks: list[Pick] = []
        self._prompt_rows: list[tuple[Sequence, list[int]]] = []
        self.picking: list[Sequence] = []
        self.num_prompt_rows: list[int] = []

    def add(self, item: ScheduledSequence, end: int, sharing: bool) -> None:
        """Add the rows of a sequence, of which ``end`` is the first that is another's."""
        sequence, num_tokens = item
        first = sequence.num_scheduled
        num_known = min(sequence.num_tokens - first, num_tokens)
        if num_known == 1:
            self._token_ids[end - num_tokens] = sequence.token(first)
        elif num_known > 1:
            begin = end - num_tokens
            self._token_ids[begin : begin + num_known] = sequence.tokens[first : first + num_known]
        if num_known < num_tokens:
            self._pending_rows.append(end - 1)
            self._pending_picks.append(sequence.last_pick)
        num_prompt_tokens = sequence.num_prompt_tokens
        self.num_prompt_rows.append(max(0, min(num_tokens, num_prompt_tokens - first)))
        if num_tokens == sequence.num_uncomputed:
            row = len(self._logits_rows)
            self._logits_rows.append(end - 1)
            self._picks.append(Pick(row, sequence.state))
            self.picking.append(sequence)
            if sharing and len(sequence.request.sequences) > 1:
                siblings = _waiting_siblings(sequence)
                self._picks += [Pick(row, sibling.state) for sibling in siblings]
                self.picking += siblings
        collected = sequence.request.prompt_logprobs
        if collected is not None and sequence is sequence.request.leader:
            wanted = collected.wanted(first, first + num_tokens)
            if wanted:
                shift = end - num_tokens - first
                self._prompt_rows.append((sequence, [shift + at for at in wanted]))

    def step(self, plan: Plan, adapter_rows: list[AdapterRows]) -> Step:
        """Return the step of all that was added."""
        logits_rows = self._logits_rows
        collecting: list[PromptRows] = []
        for sequence, wanted in self._prompt_rows:
            begin = len(logits_rows)
            collecting.append(PromptRows(sequence, begin, begin + len(wanted)))
            logits_rows += wanted
        return Step(
            plan,
            self._token_ids,
            np.array(self._pending_rows, dtype=np.int64),
            np.array(self._pending_picks, dtype=np.int64),
            np.array(logits_rows, dtype=np.int64),
            self._picks,
            collecting,
            adapter_rows,
        )


def _adapter_rows(scheduled: Sequence_[ScheduledSequence]) -> list[AdapterRows]:
    """Return the rows of each adapter, those side by side as one."""
    result: list[AdapterRows] = []
    end = 0
    for item in scheduled:
        begin, end = end, end + item.num_tokens
        name = item.sequence.request.lora
        if name is None:
            continue
        if result and (result[-1].name, result[-1].end) == (name, begin):
            begin = result.pop().begin
        result.append(AdapterRows(name, begin, end))
    return result


def _waiting_siblings(sequence: Sequence) -> list[Sequence]:
    """Return the samples that could fork from ``sequence``, which completes its prompt."""
    request = sequence.request
    if sequence is not request.leader or sequence.output.token_ids or sequence.num_pending:
        return []
    return [
        sibling
        for sibling in request.sequences
        if sibling.status is Status.WAITING and not sibling.output.token_ids
    ]
