"""The paper's workloads: Poisson arrivals of prompts that begin with a shared prefix.

Rows are those of ChunkAttention (Ye et al., ACL 2024), section 4.2: ``n_p`` prompt tokens, of which
the first ``n_s`` are shared, ``n_c`` completion tokens, and requests per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from chunkcache.errors import InvalidConfigError

# Each quantity is drawn from a generator of its own, so that changing one leaves the others.
_ARRIVALS, _PREFIXES, _CHOICES, _TAILS = range(4)


@dataclass(frozen=True)
class Row:
    """One workload.

    Attributes:
        n_p: tokens of a prompt.
        n_s: its first tokens, which it shares with others.
        n_c: tokens generated for each prompt.
        rps: requests per second, the rate of the Poisson process.
    """

    n_p: int
    n_s: int
    n_c: int
    rps: float

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.n_p < 1 or self.n_c < 1:
            raise InvalidConfigError(f"row {self.label} has no tokens; allowed is n_p, n_c >= 1")
        if not 0 <= self.n_s <= self.n_p:
            raise InvalidConfigError(
                f"row {self.label} has n_s {self.n_s}; allowed is 0 to n_p, which is {self.n_p}"
            )
        if not (self.rps > 0 and math.isfinite(self.rps)):
            raise InvalidConfigError(f"row {self.label} has rps {self.rps}; allowed is above 0")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a row written as ``n_p,n_s,n_c,rps``.

        Raises:
            InvalidConfigError: the text is not of that form, or a number is out of range.
        """
        parts = text.split(",")
        try:
            n_p, n_s, n_c = (int(part) for part in parts[:-1])
            rps = float(parts[-1])
        except ValueError:
            raise InvalidConfigError(
                f"row is {text!r}; allowed is n_p,n_s,n_c,rps, such as 1024,1024,512,1.0"
            ) from None
        return cls(n_p, n_s, n_c, rps)

    @property
    def label(self) -> str:
        """The row in a word, for tables and messages."""
        return f"{self.n_p}/{self.n_s}/{self.n_c} at {self.rps:g}/s"

    def scaled(self, scale: float) -> Row:
        """Return the row with all its lengths multiplied; a wholly shared prompt stays so."""
        n_p = max(1, round(self.n_p * scale))
        n_s = n_p if self.n_s == self.n_p else min(n_p, round(self.n_s * scale))
        return replace(self, n_p=n_p, n_s=n_s, n_c=max(1, round(self.n_c * scale)))


@dataclass(frozen=True)
class TimedRequest:
    """A request of a workload.

    Attributes:
        arrival: seconds after the workload's begin.
        prompt: token ids.
        num_output_tokens: tokens to generate, exactly.
    """

    arrival: float
    prompt: list[int]
    num_output_tokens: int


def poisson_arrivals(num_requests: int, rps: float, seed: int) -> npt.NDArray[np.float64]:
    """Return the times of a Poisson process, in seconds.

    For one seed, other rates give the same times on another scale, so that runs at different
    rates differ in nothing else.
    """
    generator = np.random.default_rng([seed, _ARRIVALS])
    return np.cumsum(generator.exponential(size=num_requests)) / rps


def poisson_workload(
    row: Row, num_requests: int, *, num_prefixes: int, vocab_size: int, seed: int
) -> list[TimedRequest]:
    """Make the requests of a row.

    Args:
        row: lengths and rate.
        num_requests: how many.
        num_prefixes: shared prefixes, each of ``row.n_s`` tokens; a request draws one of them.
        vocab_size: token ids are drawn from ``[0, vocab_size)``.
        seed: of everything that is drawn.

    Returns:
        The requests by arrival. What is not shared differs from the first token on, as far as
        the vocabulary has tokens.
    """
    prefixes = _distinct_runs(num_prefixes, row.n_s, vocab_size, [seed, _PREFIXES])
    tails = _distinct_runs(num_requests, row.n_p - row.n_s, vocab_size, [seed, _TAILS])
    chosen = np.random.default_rng([seed, _CHOICES]).integers(num_prefixes, size=num_requests)
    arrivals = poisson_arrivals(num_requests, row.rps, seed)
    return [
        TimedRequest(float(arrival), [*prefixes[choice].tolist(), *tail.tolist()], row.n_c)
        for arrival, choice, tail in zip(arrivals, chosen, tails, strict=True)
    ]


def _distinct_runs(
    count: int, length: int, vocab_size: int, seed: list[int]
) -> npt.NDArray[np.int64]:
    """Return ``[count, length]`` random tokens; the rows begin with different ones."""
    generator = np.random.default_rng(seed)
    first = generator.permutation(vocab_size)
    runs = generator.integers(vocab_size, size=(count, length))
    if length:
        runs[:, 0] = first[np.arange(count) % vocab_size]
    return runs
