"""Who is there together, and in which order they run."""

import pytest
import torch

from chunkcache.cli.serve_bench import turns
from chunkcache.cli.serve_bench.turns import in_turns, server_limits
from chunkcache.engine.capacity import pool_capacity
from chunkcache.engine.inspection import inspect_model
from chunkcache_testing.tiny_models import CONFIGS, make_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def spec():
    return inspect_model(make_model(CONFIGS["llama"]()))


@pytest.fixture
def memory(monkeypatch):
    """Say how many chunks the free memory has room for."""

    def has(num_chunks: int) -> None:
        def capacity(config, *arguments: object) -> int:
            if config.memory_fraction is None:
                return pool_capacity(config, *arguments)
            return num_chunks

        monkeypatch.setattr(turns, "pool_capacity", capacity)

    return has


def test_who_is_first_changes() -> None:
    assert "".join(in_turns("abc", 4)) == "abcbcacababc"


def test_without_rounds_nobody_runs() -> None:
    assert list(in_turns("abc", 0)) == []


@pytest.mark.parametrize(
    ("num_chunks", "capacity", "num_together"),
    [(1000, 56, 17), (120, 56, 2), (100, 56, 1), (40, 40, 1)],
)
def test_a_pool_is_what_is_of_use_within_the_memory(
    make_options, spec, memory, num_chunks: int, capacity: int, num_together: int
) -> None:
    memory(num_chunks)
    # Eight requests of 100 tokens, which are seven chunks of 16 each.
    limits, together = server_limits(make_options(), spec, CPU, 100)
    assert (limits.capacity, together) == (capacity, num_together)


def test_a_given_size_is_everybodys(make_options, spec, memory) -> None:
    memory(100)
    given = make_options(capacity_bytes=30 * spec.chunk_bytes(16))
    limits, together = server_limits(given, spec, CPU, 100)
    assert (limits.capacity, together) == (30, 3)
