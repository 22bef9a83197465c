"""A step on its way: from what the scheduler chose to what the executor runs."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from chunkcache import ChunkCache, Plan
from chunkcache.engine.lora import AdapterRows
from chunkcache.engine.picker import Pick
from chunkcache.engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence and how many of its uncomputed tokens the step computes."""

    sequence: Sequence
    num_tokens: int

    @property
    def num_prompt_rows(self) -> int:
        """Return how many of them are of the prompt, until the step is planned."""
        num_left = self.sequence.request.num_prompt_tokens - self.sequence.num_scheduled
        return max(0, min(self.num_tokens, num_left))

    @property
    def prompt_positions(self) -> range:
        """Return the positions whose logits log-probabilities of the prompt need."""
        request = self.sequence.request
        if request.prompt_logprobs is None or self.sequence is not request.leader:
            return range(0)
        begin = self.sequence.num_scheduled
        return request.prompt_logprobs.wanted(begin, begin + self.num_tokens)


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
    cache: ChunkCache, scheduled: Sequence_[ScheduledSequence], sharing: bool
) -> PlannedStep:
    """Plan a step, and note in its sequences what it computes and picks for them.

    With ``sharing``, the samples of a prompt that wait for it get their first token with it.
    """
    ends = list(accumulate(item.num_tokens for item in scheduled))
    plan = cache.plan([item.sequence.handle for item in scheduled], [0, *ends])
    token_ids = np.empty(ends[-1], dtype=np.int64)
    pending: list[tuple[int, int]] = []
    logits_rows: list[int] = []
    picks: list[Pick] = []
    picking: list[Sequence] = []
    prompt_rows: list[tuple[Sequence, list[int]]] = []
    num_prompt_rows = [item.num_prompt_rows for item in scheduled]
    decoding_only = len(scheduled) == ends[-1] and not any(num_prompt_rows)
    for item, end in zip(scheduled, ends, strict=True):
        sequence, begin = item.sequence, end - item.num_tokens
        known = sequence.tokens[sequence.num_scheduled :][: item.num_tokens]
        token_ids[begin : begin + len(known)] = known
        if len(known) < item.num_tokens:
            pending.append((end - 1, sequence.last_pick))
        if item.num_tokens == sequence.num_uncomputed:
            new = [sequence, *(_waiting_siblings(sequence) if sharing else [])]
            picks += [Pick(len(logits_rows), member.state) for member in new]
            picking += new
            logits_rows.append(end - 1)
        if item.prompt_positions:
            first = begin - sequence.num_scheduled
            prompt_rows.append((sequence, [first + at for at in item.prompt_positions]))
        sequence.num_scheduled += item.num_tokens
    for index, sequence in enumerate(picking):
        sequence.last_pick = index
        sequence.num_pending += 1
    rows, indices = np.array(pending, dtype=np.int64).reshape(-1, 2).T
    # Placeholders: the executor puts the tokens in.
    token_ids[rows] = 0
    collecting: list[PromptRows] = []
    for sequence, wanted in prompt_rows:
        collecting.append(PromptRows(sequence, len(logits_rows), len(logits_rows) + len(wanted)))
        logits_rows += wanted
    step = Step(
        plan,
        token_ids,
        rows,
        indices,
        np.array(logits_rows, dtype=np.int64),
        picks,
        collecting,
        _adapter_rows(scheduled),
    )
    return PlannedStep(step, scheduled, num_prompt_rows, picking, decoding_only)


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
