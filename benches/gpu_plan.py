"""Host time of a step's plan for 256 sequences, beside FlashInfer's `plan()`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gpu_peers
import numpy as np
import torch
from gpu_workloads import prompt

from chunkcache import Plan, attention
from chunkcache.kernels.image import TableState
from chunkcache.kernels.storage import DeviceStorage, KvShape

BATCH = 256
SHARED = 1024
CHUNK = 64
HEADS = (32, 8)
REPEATS = 40


class Planner:
    """Sequences with a common prompt, whose steps are planned and sent to the device."""

    def __init__(self) -> None:
        """Insert and compute the prompts."""
        shape = KvShape(1, HEADS[1], 128, "float16", CHUNK)
        device = torch.cuda.current_device()
        self.storage = DeviceStorage(device, shape, 4096, HEADS[0], True, None, None)
        self.tree = self.storage.host.tree
        self.seqs = [self.join(i) for i in range(BATCH)]

    def join(self, number: int) -> int:
        """Add a sequence with tokens of its own behind the common prompt; compute its prompt."""
        seq = self.tree.insert([*range(SHARED), 10_000 + number, 1]).seq
        info = self.tree.sequence(seq)
        count = info.num_tokens - info.num_computed_tokens - 1
        with self.tree.plan([seq], [0, count]) as plan:
            self.storage.host.commit(plan)
        return seq

    def step(self) -> tuple[Plan, float]:
        """Plan one token of each and send what changed; returns the plan and microseconds."""
        with self.storage.submitting() as stream:
            begin = time.perf_counter()
            plan = self.tree.plan(self.seqs)
            state = TableState.of(self.storage.host, plan)
            image = self.storage.image_of(plan, state, stream)
            image.send(self.storage.host, plan, state, stream)
            seconds = time.perf_counter() - begin
            image.apply(stream)
        return plan, seconds * 1e6

    def advance(self, plan: Plan) -> None:
        """Commit a step and add the next tokens."""
        self.storage.host.commit(plan)
        self.tree.append_batch(self.seqs, [1] * len(self.seqs))


def _ours() -> dict[str, float]:
    planner = Planner()
    steady, filled = [], []
    for _ in range(4 * CHUNK):
        plan, us = planner.step()
        length = planner.tree.sequence(planner.seqs[0]).num_tokens
        (filled if (length - SHARED) % CHUNK == 1 else steady).append(us)
        planner.advance(plan)
    joined = []
    for number in range(REPEATS):
        planner.tree.remove(planner.seqs.pop(number % BATCH))
        planner.advance(planner.step()[0])
        planner.seqs.append(planner.join(BATCH + number))
        plan, us = planner.step()
        joined.append(us)
        planner.advance(plan)
    together = []
    for lap in range(5):
        for seq in planner.seqs:
            planner.tree.remove(seq)
        planner.seqs = [planner.join((2 + lap) * 1000 + number) for number in range(BATCH)]
        plan, us = planner.step()
        together.append(us / BATCH)
        planner.advance(plan)
    return {
        "no structural change": statistics.median(steady),
        "all fill a chunk": statistics.median(filled),
        "one joins": statistics.median(joined),
        "all join, each": statistics.median(together),
    }


def _block_tables() -> dict[str, float]:
    """Time plans over others' page tables, half of whose pages are common to all."""
    page_size, context = 16, 8192
    work = prompt(BATCH, HEADS, context, context // 2, page_size=page_size)
    table, lens = work.block_table(), np.full(BATCH, context - 1)
    planner = attention.BlockTablePlanner(page_size)

    def first() -> None:
        attention.plan_from_block_tables(table, lens, page_size)

    def following() -> None:
        planner.plan(table, lens)

    following()
    name = f"page tables of {context} tokens in pages of {page_size}"
    return {f"{name}, first": _median_us(first), f"{name}, next": _median_us(following)}


@contextmanager
def _quiet() -> Iterator[None]:
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def _median_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        with _quiet():
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def _flashinfer() -> dict[str, float]:
    work = prompt(BATCH, HEADS, SHARED + 2 * CHUNK, SHARED)
    csr, levels = gpu_peers.sequences(work), gpu_peers.tree_levels(work)
    found = {}
    for name, use_tensor_cores in (("decode", False), ("decode, tensor cores", True)):
        wrapper: Any = gpu_peers.decode_wrapper(use_tensor_cores)
        found[f"flashinfer {name}"] = _median_us(
            lambda wrapper=wrapper: gpu_peers.plan_decode(wrapper, csr, work)
        )
    cascade: Any = gpu_peers.cascade_wrapper(2)
    found["flashinfer cascade"] = _median_us(lambda: gpu_peers.plan_cascade(cascade, levels, work))
    return found


def plan_times() -> dict[str, float]:
    """Return medians in microseconds by name."""
    found = {**_ours(), **_block_tables()}
    return found if gpu_peers.flashinfer() is None else {**found, **_flashinfer()}
