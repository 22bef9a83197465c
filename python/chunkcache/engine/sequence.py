"""Requests and their sequences, as the engine follows them."""

from __future__ import annotations

import time
from collections import deque
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from chunkcache.engine.detokenizer import Detokenizer, StopStrings
from chunkcache.engine.guided import Grammar
from chunkcache.engine.logprobs import Logprob, PromptLogprobs, with_text
from chunkcache.engine.outputs import CompletionOutput, RequestOutput, StreamOutput
from chunkcache.engine.params import SamplingParams
from chunkcache.engine.picker import SampleState
from chunkcache.engine.prompts import TokenizedPrompt

NO_HANDLE = -1


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One sample of a request: its tokens, its place in the cache and its text so far.

    The next step is planned before the tokens of the one that runs are known, so a sequence is
    `length` tokens long, of which the last ``num_pending`` have no id yet.

    Attributes:
        num_prompt_tokens: tokens of the request's prompt.
        rank: the class that it is served in; its request's priority, or better by ageing.
        state: what the picks of its tokens depend on; the picker's.
        handle: its handle in the cache while it is running.
        num_tokens: tokens of prompt and continuation whose ids are known.
        num_pending: tokens that steps in flight pick for it.
        num_slots: tokens that the cache's tree has, slots that are only reserved included.
        num_scheduled: tokens that are computed or that steps in flight compute.
        num_committed: tokens that are computed.
        last_pick: which of the picks of the newest step is its own.
        adopted: whether it took over the unfinished prompt of another one, whose step is in
            flight, so that where its own work begins is not known yet.
    """

    def __init__(self, request: Request, index: int, seed: int, tokenizer: Any | None) -> None:
        """Begin with the request's prompt."""
        params = request.params
        self.request = request
        self.index = index
        self.status = Status.WAITING
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.rank = request.priority
        self.output = CompletionOutput(index)
        end_token_ids = request.eos_token_ids.union(params.stop_ids)
        if request.grammar is not None:
            end_token_ids |= request.grammar.end_token_ids
        self.state = SampleState(
            params, seed, index, request.prompt_token_ids, end_token_ids, request.grammar
        )
        self.num_tokens = self.num_prompt_tokens
        self.num_pending = 0
        self.last_pick = 0
        self.leave()
        self._max_tokens = self.num_prompt_tokens + request.max_tokens
        self._tokens = np.empty(self._max_tokens, dtype=np.uint32)
        self._tokens[: self.num_tokens] = request.prompt_array
        self._stop_ids = frozenset(params.stop_ids)
        self._end_ids = frozenset() if params.ignore_eos else request.eos_token_ids
        self._detokenizer = tokenizer and Detokenizer(tokenizer, params.skip_special_tokens)
        self._stop = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        # Text that nobody looks at on the way is made at the end, all at once.
        self._defers_text = not (request.streams or params.stop_strings)
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0

    def enter(self, handle: int, num_computed: int) -> None:
        """Note a place in the cache, with all known tokens, of which the first are computed."""
        self.handle = handle
        self.num_slots = self.num_tokens
        self.num_scheduled = self.num_committed = num_computed

    def leave(self) -> None:
        """Forget the place in the cache."""
        self.handle = NO_HANDLE
        self.num_slots = self.num_scheduled = self.num_committed = 0
        self.adopted = False

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """Return the known tokens, as a view."""
        return self._tokens[: self.num_tokens]

    @property
    def last_token(self) -> int:
        """Return the newest known token."""
        return int(self._tokens[self.num_tokens - 1])

    @property
    def length(self) -> int:
        """Return the number of tokens, those without an id yet included."""
        return self.num_tokens + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Return how many tokens must still be scheduled to get the next one.

        The last token that a request may generate is not computed.
        """
        length = self.num_tokens + self.num_pending
        return length - self.num_scheduled if length < self._max_tokens else 0

    @property
    def decoding(self) -> bool:
        """Whether the one uncomputed token is one that was generated here."""
        length = self.num_tokens + self.num_pending
        return (
            length == self.num_scheduled + 1
            and self.num_prompt_tokens < length < self._max_tokens
            and not self.adopted
        )

    @property
    def order(self) -> tuple[int, int]:
        """Return the key by which older sequences go first."""
        return self.request.number, self.index

    def token(self, position: int) -> int:
        """Return a known token by its position."""
        return int(self._tokens[position])

    def accept(
        self,
        token: int,
        logprobs: dict[int, Logprob] | None = None,
        *,
        completes: bool = False,
        now: float | None = None,
    ) -> StreamOutput | None:
        """Add a generated token and return the piece of output that it makes.

        Args:
            token: its id.
            logprobs: its log-probabilities, if they are wanted.
            completes: whether the grammar of a guided text lets nothing follow.
            now: when it came, on the clock of `time.perf_counter`; now by default.

        Returns:
            The piece; None if nobody takes the request's pieces.
        """
        request, output = self.request, self.output
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        now = time.perf_counter() if now is None else now
        output.token_times.append(now - request.output.arrival_time)
        output.token_ids.append(token)
        ends = token in self._end_ids
        if completes and request.grammar is not None:
            ends = ends or token in request.grammar.end_token_ids
        text = "" if ends or self._defers_text else self._text_of(token)
        if self._stop.matched is not None:
            output.finish_reason, output.stop_reason = "stop", self._stop.matched
        elif ends or completes:
            output.finish_reason = "stop"
        elif token in self._stop_ids:
            output.finish_reason, output.stop_reason = "stop", token
        elif self.num_tokens >= self._max_tokens:
            output.finish_reason = "length"
        if output.finish_reason is not None and self._stop.matched is None:
            if self._defers_text:
                text = self._text_of(*(output.token_ids[:-1] if ends else output.token_ids))
            text += self._remaining_text()
        if text:
            output.text += text
        added = None if logprobs is None else self._add_logprobs(token, logprobs)
        if not request.streams:
            return None
        reason = output.finish_reason
        return StreamOutput(request.index, self.index, text, [token], reason, request.output, added)

    def _add_logprobs(
        self, token: int, logprobs: dict[int, Logprob]
    ) -> list[dict[int, Logprob]] | None:
        output = self.output
        if output.logprobs is None or output.cumulative_logprob is None:
            return None
        added = [with_text(logprobs, self.request.tokenizer)]
        output.logprobs += added
        output.cumulative_logprob += logprobs[token].logprob
        return added

    def _text_of(self, *tokens: int) -> str:
        if self._detokenizer is None:
            return ""
        counts = len(self.output.token_ids) > self.request.params.min_tokens
        return self._stop.push(self._detokenizer.push(*tokens), counts=counts)

    def _remaining_text(self) -> str:
        if self._detokenizer is None:
            return ""
        return self._stop.push(self._detokenizer.finish(), counts=False) + self._stop.finish()


class Request:
    """A prompt with its parameters, its samples and the output pieces not yet collected.

    Attributes:
        number: place in the order of arrival, given by the engine that takes it.
        pieces: output that nobody has taken yet.
        error: what ended it, if it did not end by itself.
    """

    def __init__(
        self,
        request_id: int | str,
        index: int,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        cache_salt: str = "",
        priority: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        tokenizer: Any | None = None,
        grammar: Grammar | None = None,
        lora: str | None = None,
        arrival_time: float | None = None,
        streams: bool = True,
    ) -> None:
        """Set up all samples.

        Args:
            request_id: how its outputs are named.
            index: position of the prompt in its call.
            prompt: its text, if it came as text, and its tokens.
            params: the caller's wishes.
            max_tokens: ``params.max_tokens`` within what the model's length leaves.
            seed: ``params.seed``, or the one that the engine gives.
            cache_salt: namespace in the prefix tree.
            priority: class in which it is served, the lowest first.
            eos_token_ids: the model's, which end a text.
            tokenizer: makes the text; None for no text.
            grammar: what the text has to keep to.
            lora: name of its adapter; None for the bare model.
            arrival_time: when it came, on the clock of `time.perf_counter`; now by default.
            streams: whether somebody takes its output piece by piece. If not, there are no pieces,
                and the texts may come with their ends.
        """
        self.number = -1
        self.index = index
        self.params = params
        self.max_tokens = max_tokens
        self.cache_salt = cache_salt
        self.priority = priority
        self.eos_token_ids = eos_token_ids
        self.tokenizer = tokenizer
        self.grammar = grammar
        self.lora = lora
        self.streams = streams
        self.prompt_token_ids = prompt.token_ids
        self.prompt_array = (
            np.array(prompt.token_ids, dtype=np.uint32) if prompt.array is None else prompt.array
        )
        self.sequences = [Sequence(self, i, seed, tokenizer) for i in range(params.n)]
        self.output = RequestOutput(
            request_id,
            prompt.text,
            prompt.token_ids,
            [seq.output for seq in self.sequences],
            arrival_time=time.perf_counter() if arrival_time is None else arrival_time,
        )
        self.prompt_logprobs = (
            None
            if params.prompt_logprobs is None
            else PromptLogprobs(prompt.token_ids, params.prompt_logprobs)
        )
        if self.prompt_logprobs is not None:
            self.output.prompt_logprobs = self.prompt_logprobs.entries
        self.pieces: deque[StreamOutput] = deque()
        self.error: Exception | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Return the length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Return how many tokens all samples have together."""
        return sum(len(sequence.output.token_ids) for sequence in self.sequences)

    @property
    def leader(self) -> Sequence:
        """Return the sample that computes the prompt for the others."""
        return self.sequences[0]

    @property
    def finished(self) -> bool:
        """Whether no sequence of the request will run again."""
        return all(seq.status is Status.FINISHED for seq in self.sequences)
