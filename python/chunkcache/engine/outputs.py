"""What `LLM.generate` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from chunkcache.engine.logprobs import Logprob


@dataclass
class CompletionOutput:
    """One sample of a request.

    Attributes:
        index: number of the sample, 0 to n - 1.
        text: the text generated so far.
        token_ids: the tokens generated so far, an end-of-sequence token included.
        finish_reason: "stop" (an end-of-sequence token, a stop string or a stop id), "length"
            (max_tokens or the model's length), or None while it is running.
        stop_reason: the stop string or stop id that ended it, None otherwise.
        logprobs: for each token a dict from token ids to log-probabilities, the token itself first,
            then the most probable ones; None if ``SamplingParams.logprobs`` is.
        cumulative_logprob: sum of the tokens' log-probabilities; None likewise.
        token_times: when each token came, in seconds after the request's arrival.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    token_times: list[float] = field(default_factory=list, compare=False)


@dataclass
class RequestOutput:
    """A request with its samples.

    Attributes:
        request_id: the caller's name of the request, or its number in its engine.
        prompt: the text of the prompt, None if it came as tokens.
        prompt_token_ids: the prompt.
        outputs: the ``n`` samples.
        cached_tokens: prompt tokens whose K/V was found in the cache when the request began.
        num_computed_prompt_tokens: prompt rows that were run through the model for this request,
            those of its further samples and those computed again after a preemption included.
        time_to_first_token: seconds from the request's arrival to its first token, NaN before it.
        latency: seconds from its arrival to its last token, NaN before it.
        prompt_logprobs: for each token of the prompt what `CompletionOutput.logprobs` has, None for
            the first one; complete with the first token. None if
            ``SamplingParams.prompt_logprobs`` is.
        arrival_time: when it came, on the clock of `time.perf_counter`.
    """

    request_id: int | str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    time_to_first_token: float = float("nan")
    latency: float = float("nan")
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    arrival_time: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(slots=True)
class StreamOutput:
    """A piece of one sample, as `LLM.generate` streams it.

    Attributes:
        request_index: position of the prompt in the call.
        index: number of the sample.
        text: the text to add to what came before, "" when none is certain yet.
        token_ids: the tokens to add to those that came before.
        finish_reason: why the sample ended with this piece, None if more is to come.
        request: the request with all its samples, as it stands by now.
        logprobs: those of ``token_ids``, as in `CompletionOutput`.
    """

    request_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    request: RequestOutput
    logprobs: list[dict[int, Logprob]] | None = None
