"""What a caller asks of one request: how to pick tokens and when to stop."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunkcache.engine.texts import check_text, shown
from chunkcache.errors import InvalidConfigError

_MAX_BIAS = 100
# vLLM's VLLM_MAX_N_SEQUENCES: each sample is a sequence with a state of its own.
_MAX_SAMPLES = 16384
_MAX_TOP_K = 2**31 - 1
_TOKEN_ID_DIGITS = 10
_GUIDED = ("guided_json", "guided_regex", "guided_choice")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends.

    Names and meanings are those of vLLM's ``SamplingParams``; where Hugging Face transformers has
    the same thing, its ``LogitsProcessor`` is named beside it. A step's logits are changed in
    vLLM's order: ``logit_bias``, ``min_tokens``, ``repetition_penalty``, ``frequency_penalty``,
    ``presence_penalty``; then, unless the best token is taken, ``temperature``, ``min_p``,
    ``top_k``, ``top_p``.

    Args:
        temperature: divides the logits; 0 (the default) takes the best token of each step.
        top_k: keep the ``top_k`` most probable tokens, below 2**31; 0 or -1 keeps all.
        top_p: keep the fewest tokens whose probabilities add up to at least ``top_p``, in (0, 1].
        min_p: keep the tokens whose probability is at least ``min_p`` times that of the most
            probable one, in [0, 1] (``MinPLogitsWarper``).
        presence_penalty: taken from the logit of every token that was generated, in [-2, 2].
        frequency_penalty: taken from it once for each time that it was generated, in [-2, 2].
        repetition_penalty: divides the logit of every token of the prompt or of what was generated
            if that is positive, multiplies it otherwise; above 0
            (``RepetitionPenaltyLogitsProcessor``).
        logit_bias: token ids and what is added to their logits, in [-100, 100] as in OpenAI's API
            (``SequenceBiasLogitsProcessor`` with single tokens). Ids may be decimal strings, as
            JSON has them.
        seed: seeds this request's own generator, so that its draws do not depend on what else is
            in the batch. None takes the next seed of the engine's generator.
        max_tokens: most tokens to generate; None means as many as the model's length allows.
        min_tokens: tokens to generate before any that ends the request: end-of-sequence and stop
            ids are not chosen among the first ``min_tokens`` tokens
            (``MinNewTokensLengthLogitsProcessor``), and a stop string that is complete by then
            does not count.
        stop: one or more strings that end the text. The text ends before the string. Of several,
            the one that is complete first counts, and of those that end together the longest.
        include_stop_str_in_output: end the text after the stop string instead.
        stop_token_ids: token ids that end the request, besides the model's end-of-sequence ids.
        ignore_eos: go on past the end-of-sequence ids.
        n: number of samples of the same prompt, at most 16384 (vLLM's limit, too). Sample ``i``
            draws from ``(seed, i)``.
        logprobs: give the log-probability of each generated token, and those of the ``logprobs``
            most probable ones; -1 for all tokens, None for none.
        prompt_logprobs: likewise for each token of the prompt but the first. Rows of the prompt
            that are cached are run through the model for it.
        guided_json: a JSON schema, as a dict or as text, that the output has to match (vLLM's
            ``guided_json``, now ``StructuredOutputsParams.json``). A text that is complete ends at
            once, whatever ``min_tokens`` and ``ignore_eos`` say. Needs the extra ``guided``.
        guided_regex: likewise a regular expression (of Rust's regex syntax) for the whole output.
        guided_choice: likewise the strings of which the output is to be one.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidConfigError: an argument is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None
    max_tokens: int | None = 128
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided_json: Mapping[str, Any] | str | None = field(default=None, hash=False)
    guided_regex: str | None = None
    guided_choice: Sequence[str] | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Check every argument."""
        self._check_choice()
        self._check_penalties()
        self._check_end()
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(self, name)
            if number is not None and (not _is_int(number) or number < -1):
                raise _out_of_range(name, number, "None, an int of at least 0, or -1 for all")
        self._check_guided()
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))

    def _check_choice(self) -> None:
        if not _is_real(self.temperature) or not 0 <= self.temperature < math.inf:
            raise _out_of_range("temperature", self.temperature, "a finite number of at least 0")
        if not _is_int(self.top_k) or not -1 <= self.top_k <= _MAX_TOP_K:
            allowed = f"an int from 1 to {_MAX_TOP_K}, or 0 or -1 for all"
            raise _out_of_range("top_k", self.top_k, allowed)
        if not _is_real(self.top_p) or not 0 < self.top_p <= 1:
            raise _out_of_range("top_p", self.top_p, "a number in (0, 1]")
        if not _is_real(self.min_p) or not 0 <= self.min_p <= 1:
            raise _out_of_range("min_p", self.min_p, "a number in [0, 1]")
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed < 2**64):
            raise _out_of_range("seed", self.seed, "None or an int in [0, 2**64)")
        if not _is_int(self.n) or not 1 <= self.n <= _MAX_SAMPLES:
            raise _out_of_range("n", self.n, f"an int from 1 to {_MAX_SAMPLES}")

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            if not _is_real(penalty) or not -2 <= penalty <= 2:
                raise _out_of_range(name, penalty, "a number in [-2, 2]")
        penalty = self.repetition_penalty
        if not _is_real(penalty) or not 0 < penalty < math.inf:
            raise _out_of_range("repetition_penalty", penalty, "a finite number above 0")

    def _check_end(self) -> None:
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            raise _out_of_range("max_tokens", self.max_tokens, "None or an int of at least 1")
        if not _is_int(self.min_tokens) or self.min_tokens < 0:
            raise _out_of_range("min_tokens", self.min_tokens, "an int of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            allowed = f"at most max_tokens, which is {shown(self.max_tokens)}"
            raise _out_of_range("min_tokens", self.min_tokens, allowed)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _out_of_range(name, getattr(self, name), "True or False")

    def _check_guided(self) -> None:
        schema, regex, choice = self.guided_json, self.guided_regex, self.guided_choice
        given = [name for name in _GUIDED if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidConfigError(f"{' and '.join(given)} are given; allowed is one of them")
        if schema is not None and not _is_json(schema):
            raise _out_of_range("guided_json", schema, "None, or a JSON schema as a dict or a str")
        if regex is not None and not isinstance(regex, str):
            raise _out_of_range("guided_regex", regex, "None, or a str")
        if choice is not None:
            choices = None if isinstance(choice, str) else _as_tuple(choice)
            if not choices or not all(isinstance(item, str) and item for item in choices):
                allowed = "None, or a list of one or more strings that are not empty"
                raise _out_of_range("guided_choice", choice, allowed)
            object.__setattr__(self, "guided_choice", choices)
        for name in given:
            value = getattr(self, name)
            for text in value if isinstance(value, tuple) else [value]:
                if isinstance(text, str):
                    check_text(name, text)

    @property
    def guided(self) -> str | None:
        """The name of the argument that guides the output, None if none does."""
        return next((name for name in _GUIDED if getattr(self, name) is not None), None)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` as a tuple."""
        return tuple(self.stop_token_ids or ())

    @property
    def greedy(self) -> bool:
        """Whether each step takes its best token."""
        return self.temperature == 0


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Check that the model has the tokens that ``params`` asks for.

    Raises:
        InvalidConfigError: a token id is not below ``vocab_size``, or more log-probabilities are
            wanted.
    """
    for token_id in params.logit_bias or ():
        if token_id >= vocab_size:
            allowed = f"ids below {vocab_size}, the size of the model's vocabulary"
            raise _out_of_range("logit_bias", params.logit_bias, allowed)
    for name in ("logprobs", "prompt_logprobs"):
        number = getattr(params, name)
        if number is not None and number > vocab_size:
            allowed = f"at most {vocab_size}, the size of the model's vocabulary"
            raise _out_of_range(name, number, allowed)


def _is_json(schema: Any) -> bool:
    """Tell whether ``schema`` is a JSON object, or the text of one."""
    try:
        value = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(value, dict)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _out_of_range(name: str, given: object, allowed: str) -> InvalidConfigError:
    return InvalidConfigError(f"{name} is {shown(given)}; allowed is {allowed}")


def _logit_bias(given: Any) -> dict[int, float] | None:
    if given is None:
        return None
    allowed = (
        f"None, or a dict from token ids in [0, 2**32) to numbers in [-{_MAX_BIAS}, {_MAX_BIAS}]"
    )
    if not isinstance(given, Mapping):
        raise _out_of_range("logit_bias", given, allowed)
    biases = {_token_id(token_id): bias for token_id, bias in given.items()}
    for token_id, bias in biases.items():
        if token_id is None or not _is_real(bias) or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise _out_of_range("logit_bias", given, allowed)
    return {token_id: float(bias) for token_id, bias in biases.items() if token_id is not None}


def _token_id(given: object) -> int | None:
    """Return a token id, also from a decimal string; None if it is not one."""
    if isinstance(given, str) and given.isascii() and given.isdigit():
        given = int(given) if len(given) <= _TOKEN_ID_DIGITS else None
    return given if isinstance(given, int) and _is_int(given) and 0 <= given < 2**32 else None


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else _as_tuple(stop)
    if strings is None or not all(isinstance(string, str) and string for string in strings):
        raise _out_of_range("stop", stop, "None, or one or more strings that are not empty")
    return strings


def _stop_ids(stop_token_ids: Sequence[int] | None) -> tuple[int, ...]:
    ids = _as_tuple(stop_token_ids)
    if ids is None or not all(_is_int(token_id) and 0 <= token_id < 2**32 for token_id in ids):
        raise _out_of_range("stop_token_ids", stop_token_ids, "None, or token ids in [0, 2**32)")
    return ids


def _as_tuple(values: Any) -> tuple[Any, ...] | None:
    """Return the values, none for None; None if they are no list of values."""
    if values is None:
        return ()
    is_list = isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping))
    return tuple(values) if is_list else None
