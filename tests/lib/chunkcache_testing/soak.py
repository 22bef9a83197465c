"""Callers that do to an `AsyncLLM` whatever callers do, and the check that nothing of it stays.

Lengths, namespaces, classes and moments are random; some callers cancel, run out of time, leave in
the middle, abort by name, take a name that is in use, or ask for what is malformed or too large.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from chunkcache import InvalidConfigError, OutOfChunksError, Plan
from chunkcache.engine import LLM, AsyncLLM, RequestOutput, SamplingParams
from chunkcache.engine.sequence import Request

VOCAB_SIZE = 300
CLOSE_LOGITS = 1e-4
MAX_TOKENS = 56
CHUNK_SIZE = 16
CAPACITY = 22
_MALFORMED: list[Any] = [[], [-1], [VOCAB_SIZE], [1.5], None, 7, "no tokenizer", [[1], [2]], b"x"]


@dataclass
class Record:
    """What happened.

    Attributes:
        answers: prompt and output of each request that ended by itself.
        ends: how often a caller ended in which way.
    """

    answers: list[tuple[list[int], RequestOutput]] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)


class Callers:
    """A round of callers."""

    def __init__(self, llm: AsyncLLM, prompts: list[list[int]], seed: int) -> None:
        self._llm = llm
        self._prompts = prompts
        self._random = random.Random(seed)
        self.record = Record()
        self._ways: list[tuple[int, Callable[[str], Awaitable[str]]]] = [
            (10, self._reads_to_the_end),
            (2, self._cancels),
            (2, self._runs_out_of_time),
            (2, self._leaves_in_the_middle),
            (2, self._aborts_by_name),
            (1, self._takes_a_name_twice),
            (1, self._asks_for_too_much),
            (1, self._asks_for_nonsense),
        ]

    async def run(self, num_callers: int) -> None:
        weights, ways = zip(*self._ways, strict=True)
        chosen = self._random.choices(ways, weights, k=num_callers)
        await asyncio.gather(*(self._call(way, str(i)) for i, way in enumerate(chosen)))

    async def _call(self, way: Callable[[str], Awaitable[str]], name: str) -> None:
        await asyncio.sleep(self._random.uniform(0, 0.3))
        self.record.ends[await way(name)] += 1

    def _request(self) -> tuple[list[int], dict[str, Any]]:
        prompt = self._random.choice(self._prompts)
        params = SamplingParams(
            max_tokens=self._random.choice((self._random.randint(1, 8), MAX_TOKENS)),
            n=self._random.choice((1, 1, 1, 2)),
        )
        return prompt, {
            "sampling_params": params,
            "cache_salt": self._random.choice(("", "a", "b")),
            "priority": self._random.choice((-1, 0, 0, 3)),
        }

    async def _read(self, name: str) -> RequestOutput:
        prompt, options = self._request()
        output = None
        async for latest in self._llm.generate(prompt, request_id=name, **options):
            output = latest
        assert output is not None
        assert output.finished
        if all(sample.finish_reason != "abort" for sample in output.outputs):
            self.record.answers.append((prompt, output))
        return output

    async def _reads_to_the_end(self, name: str) -> str:
        await self._read(name)
        return "finished"

    async def _cancels(self, name: str) -> str:
        task = asyncio.create_task(self._read(name))
        await asyncio.sleep(self._random.uniform(0, 0.2))
        task.cancel()
        await asyncio.wait({task})
        return "cancelled" if task.cancelled() else "finished"

    async def _runs_out_of_time(self, name: str) -> str:
        try:
            await asyncio.wait_for(self._read(name), self._random.uniform(0, 0.2))
        except TimeoutError:
            return "timed out"
        return "finished"

    async def _leaves_in_the_middle(self, name: str) -> str:
        prompt, options = self._request()
        num_left = self._random.randint(1, 6)
        async for output in self._llm.generate(prompt, request_id=name, **options):
            num_left -= 1
            if num_left == 0 and not output.finished:
                return "left"
        return "finished"

    async def _aborts_by_name(self, name: str) -> str:
        task = asyncio.create_task(self._read(name))
        await asyncio.sleep(self._random.uniform(0, 0.2))
        await self._llm.abort(name)
        output = await task
        is_aborted = any(sample.finish_reason == "abort" for sample in output.outputs)
        return "aborted" if is_aborted else "finished"

    async def _takes_a_name_twice(self, name: str) -> str:
        task = asyncio.create_task(self._read(name))
        await asyncio.sleep(0)
        try:
            await self._read(name)
        except InvalidConfigError:
            return "refused"
        finally:
            await task
        return "finished"

    async def _asks_for_too_much(self, name: str) -> str:
        params = SamplingParams(max_tokens=CHUNK_SIZE * CAPACITY)
        try:
            async for _ in self._llm.generate([1, 2], params, request_id=name):
                pass
        except OutOfChunksError:
            return "refused"
        raise AssertionError("more than the pool was not refused")

    async def _asks_for_nonsense(self, name: str) -> str:
        prompt = self._random.choice(_MALFORMED)
        try:
            async for _ in self._llm.generate(prompt, request_id=name):
                pass
        except InvalidConfigError:
            return "refused"
        raise AssertionError(f"{prompt!r} was not refused")


def make_prompts(seed: int, number: int = 24) -> list[list[int]]:
    """Make prompts of 1 to 104 tokens, most of which begin as others do."""
    source = random.Random(seed)
    prefixes = [[source.randrange(VOCAB_SIZE) for _ in range(64)] for _ in range(3)]
    prompts = []
    for _ in range(number):
        prefix = source.choice([*prefixes, []])[: source.randint(0, 64)]
        tail = [source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 40))]
        prompts.append([*prefix, *tail])
    return prompts


async def soak(llm: AsyncLLM, prompts: list[list[int]], seed: int, num_callers: int) -> Record:
    """Run a round of callers, and check that every account is square after it."""
    callers = Callers(llm, prompts, seed)
    await _finish(asyncio.create_task(callers.run(num_callers)), llm, callers.record)
    # Iterators that were left are closed by the event loop.
    for _ in range(20):
        await asyncio.sleep(0)
    await llm.check_accounts()
    assert llm.llm.engine.num_unfinished == 0
    return callers.record


async def _finish(task: asyncio.Task[None], llm: AsyncLLM, record: Record) -> None:
    """Wait for a round, as long as it gets on, however slow the machine is."""
    progress = None
    while not (await asyncio.wait({task}, timeout=60))[0]:
        before, progress = progress, (llm.stats.num_steps, record.ends.total())
        if progress == before:
            task.cancel()
            raise AssertionError(f"no step and no caller ended for a minute, after {progress}")
    task.result()


class Alone:
    """The answers that requests get alone, without sharing and with memory for all."""

    def __init__(self, model: Any) -> None:
        self._llm = LLM(model, chunk_size=CHUNK_SIZE, enable_prefix_sharing=False)
        self._answers: dict[tuple[int, ...], tuple[list[int], int]] = {}

    def check(self, prompt: list[int], output: RequestOutput) -> None:
        """Check greedy tokens up to where the two best logits are closer than `CLOSE_LOGITS`."""
        tokens, num_certain = self._answer(prompt)
        for sample in output.outputs:
            num_compared = min(len(sample.token_ids), num_certain)
            assert sample.token_ids[:num_compared] == tokens[:num_compared]

    def _answer(self, prompt: list[int]) -> tuple[list[int], int]:
        key = tuple(prompt)
        if key not in self._answers:
            params = SamplingParams(max_tokens=MAX_TOKENS, logprobs=2)
            sample = self._llm.generate(prompt, params)[0].outputs[0]
            num_certain = len(sample.token_ids)
            for position, entry in enumerate(sample.logprobs or ()):
                best, second = sorted((item.logprob for item in entry.values()), reverse=True)[:2]
                if best - second < CLOSE_LOGITS:
                    num_certain = position
                    break
            self._answers[key] = (sample.token_ids, num_certain)
        return self._answers[key]


def count_leftovers() -> int:
    """Return how many requests and plans are still in memory."""
    gc.collect()
    return sum(type(item) in (Request, Plan) for item in gc.get_objects())


def resident_bytes() -> int:
    """Return the memory of this process, as Linux counts it."""
    gc.collect()
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
