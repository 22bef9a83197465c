"""Which contenders are there together, and in which order they run.

What is compared is run in turns: a machine that others use, or that grows warm, is then the same
for all. Where the pools of all do not fit into the memory together, some come after others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from chunkcache.cli.serve_bench.contenders import ServerLimits
from chunkcache.cli.serve_bench.options import BenchOptions
from chunkcache.engine import EngineConfig, ModelSpec
from chunkcache.engine.capacity import pool_capacity

T = TypeVar("T")

# Of the memory that is free when the model is there; the rest is for activations. The host's is
# also everybody else's.
_MEMORY_FRACTION = {"cpu": 0.6, "cuda": 0.85}


def server_limits(
    options: BenchOptions, spec: ModelSpec, device: Any, longest: int
) -> tuple[ServerLimits, int]:
    """Return what each contender gets, and how many contenders fit into the memory together.

    Args:
        options: the choices.
        spec: of the model, which is loaded.
        device: the model's.
        longest: most tokens of a request and its continuation.
    """
    chunk_bytes = spec.chunk_bytes(options.chunk_size)
    fraction = _MEMORY_FRACTION[device.type]
    affordable = pool_capacity(_config(options, fraction), spec, chunk_bytes, device)
    if options.capacity_bytes is None:
        useful = options.max_num_seqs * -(-longest // options.chunk_size)
        capacity = min(affordable, useful)
    else:
        given = _config(options, None, options.capacity_bytes)
        capacity = pool_capacity(given, spec, chunk_bytes, device)
    limits = ServerLimits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        chunk_size=options.chunk_size,
        capacity=capacity,
    )
    return limits, max(1, affordable // capacity)


def _config(
    options: BenchOptions, fraction: float | None, capacity_bytes: int | None = None
) -> EngineConfig:
    return EngineConfig(
        chunk_size=options.chunk_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        memory_fraction=fraction,
        capacity_bytes=capacity_bytes,
    )


def in_turns(items: Sequence[T], num_rounds: int) -> Iterator[T]:
    """Return every item once a round; who is first changes from round to round."""
    for number in range(num_rounds):
        turn = number % len(items)
        yield from [*items[turn:], *items[:turn]]
