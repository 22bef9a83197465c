"""An engine over a model that counts: after token t it is sure of t + 1."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from chunkcache import ChunkCache
from chunkcache.engine.core import Engine
from chunkcache.engine.executor import StepExecutor
from chunkcache.engine.params import SamplingParams
from chunkcache.engine.picker import Pick, Picked, TokenPicker
from chunkcache.engine.prompts import TokenizedPrompt
from chunkcache.engine.runner import StepInput
from chunkcache.engine.scheduler import Scheduler
from chunkcache.engine.sequence import Request

VOCAB_SIZE = 1000


class CountingRunner:
    """A model without K/V; it notes what each step computes.

    Attributes:
        steps: for each step the number of rows of each of its sequences.
        before: called with the number of the step before it is computed.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.before: Callable[[int], None] = lambda number: None

    def run(self, step: StepInput) -> torch.Tensor:
        self.before(len(self.steps))
        ends = step.plan.qo_indptr.tolist()
        self.steps.append([end - begin for begin, end in itertools.pairwise(ends)])
        tokens = step.tokens.on_device()[step.logits_rows]
        return torch.nn.functional.one_hot((tokens + 1) % VOCAB_SIZE, VOCAB_SIZE).float()


class FailingPicker(TokenPicker):
    """A picker that fails for the samples of the given seeds, or altogether."""

    def __init__(self, seeds: set[int], *, altogether: bool = False) -> None:
        super().__init__()
        self._seeds = seeds
        self._altogether = altogether

    def pick(self, logits: torch.Tensor, picks: list[Pick]) -> Picked:
        picked = super().pick(logits, picks)
        for index, pick in enumerate(picks):
            if pick.state.params.seed in self._seeds:
                if self._altogether:
                    raise RuntimeError("no dice")
                picked.errors[index] = RuntimeError("no dice")
        return picked


class FakeEngine:
    """An engine with all that belongs to it."""

    def __init__(
        self,
        *,
        capacity: int = 1000,
        chunk_size: int = 16,
        overlap: bool = True,
        picker: TokenPicker | None = None,
        sharing: bool = True,
        **limits: Any,
    ) -> None:
        self.cache = ChunkCache(
            1, 1, 16, chunk_size=chunk_size, capacity=capacity, enable_prefix_sharing=sharing
        )
        self.runner = CountingRunner()
        options = {"max_num_seqs": 64, "max_num_batched_tokens": 256, **limits}
        self.scheduler = Scheduler(self.cache, sharing=sharing, **options)
        self.engine = Engine(
            StepExecutor(self.runner, picker or TokenPicker(), overlap=overlap),
            self.scheduler,
            chunk_bytes=1,
        )
        self._ids = itertools.count()

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        priority: int = 0,
        cache_salt: str = "",
        eos_token_ids: tuple[int, ...] = (),
        **params: Any,
    ) -> Request:
        request = Request(
            next(self._ids),
            0,
            TokenizedPrompt(None, prompt),
            SamplingParams(max_tokens=max_tokens, **params),
            max_tokens=max_tokens,
            seed=0,
            cache_salt=cache_salt,
            priority=priority,
            eos_token_ids=frozenset(eos_token_ids),
        )
        self.engine.add([request])
        return request

    def run(self, max_steps: int = 10_000) -> None:
        """Step until no request is left."""
        for _ in range(max_steps):
            if not self.engine.num_unfinished:
                self.engine.settle()
                return
            self.engine.step()
        raise AssertionError(f"{self.engine.num_unfinished} requests left")


def counted(prompt: list[int], max_tokens: int = 8) -> list[int]:
    """Return what the counting model says after ``prompt``."""
    return [(prompt[-1] + 1 + i) % VOCAB_SIZE for i in range(max_tokens)]


def tokens_of(request: Request) -> list[int]:
    """Return the tokens of a request's first sample."""
    return request.output.outputs[0].token_ids
