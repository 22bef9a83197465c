"""What the host does beside a CUDA device: plans, block tables, the engine's Python. Needs no GPU.

Plans are followed by a copy of the tables that is played by a buffer in host memory: `plan` is what
`ChunkCache.plan` takes on a device, `patch` is what writes the words that would travel. Times of
the engine are CPU times of its thread, over a model that returns the same logits for every row.

    python benches/host.py [--rounds 60]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from timing import machine

from chunkcache import attention
from chunkcache._core import BlockTablePlanner, DeviceCache, Plan
from chunkcache.engine import LLM, SamplingParams
from chunkcache.engine.runner import StepInput
from chunkcache.kernels.image import TableState
from chunkcache.kernels.work import DeviceCosts, Heads

BATCH = 256
CHUNK = 64
SHARED = 2048
OWN = 70
HEADS = Heads(8, 4, 8, True).packed()
COSTS = DeviceCosts().packed()
US = 1e6


class Follower:
    """A copy of tables that is kept up to date as a device's is, but for the transfer."""

    def __init__(self, host: DeviceCache | BlockTablePlanner) -> None:
        """Begin with nothing."""
        self._host = host
        self._held = (0, 0)
        self._buffer = np.empty(0, dtype=np.uint32)

    def sync(self, plan: Plan) -> int:
        """Write the patch of a plan; return its words."""
        if len(self._buffer) == 0:
            self._buffer = np.zeros(self._host.max_patch_words(plan), dtype=np.uint32)
        address, size = self._buffer.ctypes.data, len(self._buffer)
        words = self._host.stage(plan, self._held, address, size, 1)
        state = TableState.of(self._host, plan)
        self._held = (state.image_id, state.version)
        return words


class Decoding:
    """Sequences that decode behind one prompt."""

    def __init__(self) -> None:
        """Compute their prompts."""
        self._cache = DeviceCache(1 << 40, (1, 20_000, 8, CHUNK, 128, 2), HEADS, COSTS, True)
        self._follower = Follower(self._cache)
        self._num_tails = 0
        self.seqs: list[int] = []
        self.join(BATCH)
        self.step(BATCH)

    def join(self, count: int) -> None:
        """Add sequences whose own tokens are not computed yet."""
        for _ in range(count):
            self._num_tails += 1
            tail = np.arange(OWN) + (1 << 20) + OWN * self._num_tails
            tokens = np.concatenate([np.arange(SHARED), tail]).astype(np.uint32)
            self.seqs.append(self._cache.tree.insert(tokens).seq)

    def join_alone(self, count: int) -> None:
        """Add sequences one by one, each with a plan of its own that the copy does not follow."""
        for _ in range(count):
            self.join(1)
            seq = self.seqs[-1]
            with self._cache.tree.plan([seq], [0, self._left(seq) - 1]) as plan:
                self._cache.commit(plan)

    def leave(self, count: int) -> None:
        """Remove the oldest sequences."""
        for seq in self.seqs[:count]:
            self._cache.tree.remove(seq)
        del self.seqs[:count]

    def decode(self, num_new: int = 0) -> tuple[float, float, int]:
        """Run a step: one token of each sequence, but the prompts of the last ``num_new``."""
        old = self.seqs[: len(self.seqs) - num_new]
        self._cache.tree.append_batch(old, np.ones(len(old), dtype=np.uint32))
        return self.step(num_new)

    def step(self, num_new: int = 0) -> tuple[float, float, int]:
        """Plan and commit; returns the microseconds of plan and patch, and the patch's words."""
        indptr = None
        if num_new:
            counts = [1] * (len(self.seqs) - num_new) + list(map(self._left, self.seqs[-num_new:]))
            indptr = [0, *np.cumsum(counts).tolist()]
        begin = time.perf_counter()
        plan = self._cache.tree.plan(self.seqs, indptr)
        planned = time.perf_counter()
        words = self._follower.sync(plan)
        end = time.perf_counter()
        self._cache.commit(plan)
        return US * (planned - begin), US * (end - planned), words

    def _left(self, seq: int) -> int:
        info = self._cache.tree.sequence(seq)
        return info.num_tokens - info.num_scheduled_tokens

    @property
    def fills(self) -> bool:
        """Whether the next token of each sequence begins a chunk."""
        return self._cache.tree.sequence(self.seqs[0]).num_tokens % CHUNK == 0


def plans(rounds: int) -> Iterator[tuple[str, list[tuple[float, float, int]]]]:
    """Yield the cases of a decoding batch, and the microseconds and words of their steps."""
    decoding = Decoding()
    steady, filling = [], []
    while len(steady) < 8 * rounds:
        fills = decoding.fills
        (filling if fills else steady).append(decoding.decode())
    yield "nothing structural", steady[1:]
    yield "all fill a chunk", filling
    for count in (1, 4, 16):
        decoding = Decoding()
        joined, after = [], []
        for _ in range(rounds):
            decoding.leave(count)
            decoding.decode()
            decoding.join(count)
            joined.append(decoding.decode(count))
            after.append(decoding.decode())
        yield f"{count} join with {OWN} tokens", joined
        yield "the step after that", after
    decoding, joined = Decoding(), []
    for _ in range(rounds // 6):
        decoding.leave(BATCH)
        decoding.join_alone(BATCH)
        joined.append(decoding.step())
    yield "all, joined one by one", joined


def block_tables(rounds: int) -> Iterator[tuple[str, list[tuple[float, float, int]]]]:
    """Yield the cases of 256 sequences of 8,192 tokens, half of them shared, in pages of 16."""
    pages = np.arange(600)
    own = (np.arange(BATCH)[:, None] + 1) * 600 + pages
    table = np.where(pages < 256, pages, own).astype(np.int32)
    for only_grew in (False, True):
        first, grown, paged = [], [], []
        for _ in range(rounds // 6):
            planner = attention.BlockTablePlanner(16)
            follower = Follower(planner._planner)
            lens = np.full(BATCH, 8192, dtype=np.int32)
            for step in range(34):
                begin = time.perf_counter()
                plan = planner.plan(table, lens, only_grew=only_grew)
                planned = time.perf_counter()
                if step == 0:
                    planner._planner.set_heads(plan, HEADS, COSTS)
                words = follower.sync(plan)
                end = time.perf_counter()
                times = (US * (planned - begin), US * (end - planned), words)
                kind = paged if lens[0] % 16 == 1 else grown
                (kind if step else first).append(times)
                lens = lens + 1
        suffix = ", only_grew" if only_grew else ""
        if not only_grew:
            yield "tables of others: first plan", first
        yield f"grown by a token{suffix}", grown
        yield f"grown by a page{suffix}", paged


class SameLogits:
    """A model that is sure of one token."""

    device = torch.device("cpu")

    def __init__(self, vocab_size: int) -> None:
        """Make the logits of many rows."""
        self._logits = torch.zeros(1024, vocab_size)
        self._logits[:, 3] = 1
        self.first = 0.0

    def run(self, step: StepInput) -> torch.Tensor:
        """Return the logits of a step, and note when the first one came."""
        self.first = self.first or time.thread_time()
        return self._logits[: len(step.logits_rows)]


def engine(rounds: int) -> Iterator[tuple[str, float]]:
    """Yield what the engine's Python takes, in milliseconds."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    llm = LLM(
        transformers.LlamaForCausalLM(config),
        capacity=4000,
        max_num_batched_tokens=8192,
        enable_overlap=False,
    )
    model = SameLogits(256)
    patch.object(llm.engine._executor, "_runner", model).start()
    rng = np.random.default_rng(0)

    def timed(work: Callable[[], Any]) -> float:
        begin = time.thread_time()
        work()
        return time.thread_time() - begin

    params = SamplingParams(max_tokens=rounds + 40, ignore_eos=True)
    for batch in (32, BATCH):
        for streams in (True, False):
            prompts = [rng.integers(0, 250, 100).tolist() for _ in range(batch)]
            requests = llm._requests(prompts, params, "", 0, None, streams=streams)
            llm.engine.add(requests)
            for _ in range(20):
                llm.engine.step()
            times = [timed(llm.engine.step) for _ in range(rounds)]
            llm.engine.abort(requests)
            kind = "pieces taken" if streams else "no pieces"
            yield f"a step of {batch} sequences, {kind}", 1e3 * statistics.median(times)
    prompts = [rng.integers(0, 250, 4096).tolist() for _ in range(32)]
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    llm.generate(prompts, one)
    waits = []
    for _ in range(rounds // 6):
        model.first = 0.0
        begin = time.thread_time()
        llm.generate(prompts, one)
        waits.append(model.first - begin)
    yield "32 cached prompts of 4,096 ids, up to the model", 1e3 * statistics.median(waits)


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    console = Console()
    console.print(machine())
    table = Table("256 sequences, work items for an H200", "plan us", "patch us", "words")
    for cases in (plans(rounds), block_tables(rounds)):
        for name, times in cases:
            plan, patch, words = map(statistics.median, zip(*times, strict=True))
            table.add_row(name, f"{plan:.0f}", f"{patch:.0f}", f"{words:.0f}")
    console.print(table)
    table = Table("the engine's Python", "ms")
    for name, milliseconds in engine(rounds):
        table.add_row(name, f"{milliseconds:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
