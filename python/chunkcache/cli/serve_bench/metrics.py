"""What a run of a workload says: latencies, their percentiles, throughput and peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ServedRequest:
    """A request that was answered; all times in seconds after the workload's begin.

    Attributes:
        arrival: when it came. Its waiting counts from here, whatever the server was doing.
        token_times: when each of its tokens was there.
    """

    arrival: float
    token_times: list[float]

    @property
    def time_to_first_token(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.token_times[0] - self.arrival

    @property
    def normalised_latency(self) -> float:
        """Seconds from the arrival to the last token, over the number of tokens (Orca, vLLM)."""
        return (self.token_times[-1] - self.arrival) / len(self.token_times)

    @property
    def gaps(self) -> list[float]:
        """Seconds between each token and the one before."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True)
class Run:
    """A workload, served to its end.

    Attributes:
        requests: in the order of their arrival.
        peak_kv_bytes: most bytes of K and V that requests under way held at once.
        peak_batch: most requests that ran together.
        num_prompt_tokens_computed: prompt rows that went through the model; None if not known.
    """

    requests: list[ServedRequest]
    peak_kv_bytes: int
    peak_batch: int
    num_prompt_tokens_computed: int | None = None


@dataclass(frozen=True)
class Percentiles:
    """Of one quantity, in milliseconds, with linear interpolation between the two nearest."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles | None:
        """Summarise; None if there is nothing to summarise."""
        if not len(seconds):
            return None
        return cls(*(1e3 * float(value) for value in np.percentile(seconds, [50, 90, 99])))


@dataclass(frozen=True)
class Summary:
    """The figures of a run.

    Attributes:
        normalised_latency_ms: mean over the requests of their time in the system, over their
            number of tokens.
        normalised_latency: its percentiles over the requests.
        time_to_first_token: percentiles over the requests.
        inter_token_latency: percentiles over all gaps of all requests; None if no request has two
            tokens.
        peak_kv_bytes: as in `Run`.
        peak_batch: as in `Run`.
        num_prompt_tokens_computed: as in `Run`.
        requests_per_second: requests over the time from the first arrival to the last token.
        tokens_per_second: generated tokens over the same time.
    """

    normalised_latency_ms: float
    normalised_latency: Percentiles | None
    time_to_first_token: Percentiles | None
    inter_token_latency: Percentiles | None
    peak_kv_bytes: int
    peak_batch: int
    num_prompt_tokens_computed: int | None
    requests_per_second: float
    tokens_per_second: float

    def record(self) -> dict[str, Any]:
        """Return the figures as a dictionary that JSON can hold."""
        return asdict(self)


def summarise(run: Run) -> Summary:
    """Return the figures of a run of at least one request."""
    requests = run.requests
    latencies = [request.normalised_latency for request in requests]
    begin = min(request.arrival for request in requests)
    seconds = max(request.token_times[-1] for request in requests) - begin
    num_tokens = sum(len(request.token_times) for request in requests)
    return Summary(
        normalised_latency_ms=1e3 * float(np.mean(latencies)),
        normalised_latency=Percentiles.of(latencies),
        time_to_first_token=Percentiles.of([r.time_to_first_token for r in requests]),
        inter_token_latency=Percentiles.of([gap for r in requests for gap in r.gaps]),
        peak_kv_bytes=run.peak_kv_bytes,
        peak_batch=run.peak_batch,
        num_prompt_tokens_computed=run.num_prompt_tokens_computed,
        requests_per_second=len(requests) / seconds,
        tokens_per_second=num_tokens / seconds,
    )
