"""Two hundred callers against a pool far too small; `make soak` runs many rounds of it."""

import asyncio
import os

import pytest

from chunkcache.engine import AsyncLLM
from chunkcache_testing.soak import (
    CAPACITY,
    CHUNK_SIZE,
    Alone,
    Record,
    count_leftovers,
    make_prompts,
    resident_bytes,
    soak,
)

# CHUNKCACHE_SOAK_ROUNDS: rounds of two hundred callers.
NUM_ROUNDS = int(os.environ.get("CHUNKCACHE_SOAK_ROUNDS", "1"))
NUM_CALLERS = 200
# Rounds until the allocators have what they will keep, and what they may take after that.
NUM_WARM_UP_ROUNDS = 5
ALLOWED_GROWTH = 24 << 20

pytestmark = pytest.mark.timeout(300 + 60 * NUM_ROUNDS)


def _run(model, prompts) -> list[Record]:
    async def main() -> list[Record]:
        async with AsyncLLM(
            model,
            chunk_size=CHUNK_SIZE,
            capacity=CAPACITY,
            max_num_seqs=12,
            max_num_batched_tokens=48,
        ) as llm:
            records = []
            sizes = []
            for seed in range(NUM_ROUNDS):
                records.append(await soak(llm, prompts, seed, NUM_CALLERS))
                sizes.append(resident_bytes())
            assert llm.stats.num_preemptions > 0
            if NUM_ROUNDS > NUM_WARM_UP_ROUNDS:
                assert sizes[-1] - sizes[NUM_WARM_UP_ROUNDS] < ALLOWED_GROWTH
            return records

    return asyncio.run(main())


def test_two_hundred_callers_leave_nothing_and_get_the_answers_that_they_get_alone(llama) -> None:
    prompts = make_prompts(seed=1)
    num_before = count_leftovers()
    records = _run(llama, prompts)
    assert count_leftovers() == num_before
    alone = Alone(llama)
    for record in records:
        assert record.ends.total() == NUM_CALLERS
        assert min(record.ends[end] for end in ("finished", "cancelled", "aborted", "refused")) > 0
        for prompt, output in record.answers:
            alone.check(prompt, output)
