"""What a caller asks of one request: how to pick tokens and when to stop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chunkcache.errors import InvalidConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends.

    Args:
        temperature: divides the logits; 0 (the default) takes the best token of each step.
        top_k: keep the ``top_k`` most probable tokens; 0 or -1 keeps all.
        top_p: keep the fewest tokens whose probabilities add up to at least ``top_p``, in (0, 1].
        seed: seeds this request's own generator, so that its draws do not depend on what else is
            in the batch. None takes the next seed of the engine's generator.
        max_tokens: most tokens to generate; None means as many as the model's length allows.
        stop: one or more strings that end the text. The text ends before the string.
        stop_token_ids: token ids that end the request, besides the model's end-of-sequence ids.
        ignore_eos: go on past the end-of-sequence ids.
        n: number of samples of the same prompt. Sample ``i`` draws from ``(seed, i)``.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidConfigError: an argument is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 128
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    n: int = 1
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Check every argument."""
        if not _is_real(self.temperature) or not 0 <= self.temperature < math.inf:
            raise _out_of_range("temperature", self.temperature, "a finite number of at least 0")
        if not _is_int(self.top_k) or self.top_k < -1:
            raise _out_of_range("top_k", self.top_k, "an int of at least 1, or 0 or -1 for all")
        if not _is_real(self.top_p) or not 0 < self.top_p <= 1:
            raise _out_of_range("top_p", self.top_p, "a number in (0, 1]")
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed < 2**64):
            raise _out_of_range("seed", self.seed, "None or an int in [0, 2**64)")
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            raise _out_of_range("max_tokens", self.max_tokens, "None or an int of at least 1")
        if not _is_int(self.n) or self.n < 1:
            raise _out_of_range("n", self.n, "an int of at least 1")
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _out_of_range(name, getattr(self, name), "True or False")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))

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


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _out_of_range(name: str, given: object, allowed: str) -> InvalidConfigError:
    return InvalidConfigError(f"{name} is {given!r}; allowed is {allowed}")


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
