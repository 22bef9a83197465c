"""Runs decode steps on a CUDA device as one graph replay each.

Launching the kernels of a model's step one by one takes longer than they run. So the whole step is
recorded once for some numbers of rows, and replayed: the plan's tables, which are all that differs
from step to step, are brought up to date on the device by the graph's first kernel.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from contextlib import nullcontext
from typing import Any

import torch

from chunkcache import ChunkCache
from chunkcache.engine.attention import keep_from_compilation
from chunkcache.engine.decode_chain import DecodeChain, can_chain
from chunkcache.engine.decode_stack import find_stack
from chunkcache.engine.device import to_device
from chunkcache.engine.fused_norms import fused_norms
from chunkcache.engine.lora import Adapters
from chunkcache.engine.picker import best_tokens
from chunkcache.engine.runner import ModelRunner, StepInput
from chunkcache.engine.token_feed import TokenFeed
from chunkcache.errors import InvalidConfigError, KernelError
from chunkcache.kernels.decode import MAX_ROWS

logger = logging.getLogger(__name__)


def row_counts(max_rows: int) -> list[int]:
    """Return the numbers of rows that steps are recorded for: powers of two, then every 32."""
    counts = [1, 2, 4, 8, 16, *range(32, max_rows, 32)]
    return [*(n for n in counts if n < max_rows), max_rows]


class GraphRunner:
    """A `ModelRunner` whose decode steps are CUDA graphs.

    A recorded step begins with the tokens that the step before picked and ends with those that it
    picks itself, so that between two steps nothing is launched. Steps that compute prompts, or rows
    of a LoRA adapter, run as `ModelRunner` runs them.
    """

    def __init__(
        self,
        model: Any,
        cache: ChunkCache,
        adapters: Adapters | None = None,
        *,
        max_rows: int,
        num_positions: int,
        compiled: bool = False,
    ) -> None:
        """Record decode steps of up to ``max_rows`` sequences.

        Args:
            model: the model.
            cache: what holds its K/V.
            adapters: its LoRA adapters.
            max_rows: the most sequences of a recorded step.
            num_positions: how long a sequence may get.
            compiled: whether torch.compile is to fuse what lies between the attention and the
                matrix products, where our own kernels do not.

        Raises:
            InvalidConfigError: the model cannot be recorded, or not be compiled.
        """
        self._plain = ModelRunner(model, cache, adapters)
        self._recorder = self._plain
        self._cache = cache
        counts = row_counts(max_rows)
        stack = find_stack(model, num_positions)
        self._chain: DecodeChain | None = None
        if stack is not None and can_chain(stack, cache):
            self._chain = DecodeChain(stack, cache, [n for n in counts if n <= MAX_ROWS])
        if compiled and not (self._chain and counts[-1] <= MAX_ROWS):
            keep_from_compilation()
            self._recorder = ModelRunner(
                model, cache, adapters, forward=torch.compile(model, dynamic=True)
            )
        self._tokens = TokenFeed(max_rows, self.device)
        self._outgrown: set[int] = set()
        self._newest: torch.Tensor | None = None
        self._graphs: dict[int, _RecordedStep] = {}
        # The largest first: the others fit into the memory that it leaves.
        for rows in reversed(counts):
            self._graphs[rows] = self._recorded(rows)
        self._counts = counts

    @property
    def device(self) -> torch.device:
        """Return where the tokens of a step are expected and the logits come."""
        return self._plain.device

    def run(self, step: StepInput) -> torch.Tensor:
        """Compute a step; see `ModelRunner.run`.

        The logits of a decode step are overwritten by the next one of as many rows.
        """
        self._newest = None
        rows = step.plan.num_rows
        if not step.is_decode or step.adapter_rows or rows > self._counts[-1]:
            return self._plain.run(step)
        recorded_rows = self._counts[bisect_left(self._counts, rows)]
        try:
            logits = self._graphs[recorded_rows].replay(step, self._tokens)
        except KernelError as error:
            if recorded_rows not in self._outgrown:
                self._outgrown.add(recorded_rows)
                logger.warning("decode steps of %d rows run unrecorded: %s", recorded_rows, error)
            return self._plain.run(step)
        if not step.takes_all_rows:
            return logits[to_device(step.logits_rows, self.device)]
        self._newest = logits[:rows]
        return self._newest

    def best_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the best token of each row; those of a recorded step are there already."""
        if logits is self._newest:
            return self._tokens.picked[: len(logits)]
        return best_tokens(logits)

    def _recorded(self, rows: int) -> _RecordedStep:
        chain = self._chain if rows <= MAX_ROWS else None
        is_plain = chain is None and self._recorder is self._plain
        norms = fused_norms(self._plain.model) if is_plain else nullcontext()
        every_row = torch.arange(rows, device=self.device)
        with torch.inference_mode(), torch.cuda.device(self.device):
            try:
                # Libraries set themselves up at first use, which cannot be recorded.
                with self._cache.plan([None] * rows) as plan:
                    self._recorder.forward(plan, every_row, every_row, every_row)
                with self._cache.plan([None] * rows) as plan, norms:
                    return _RecordedStep(chain or self._recorder, self._cache, plan, self._tokens)
            except (RuntimeError, KernelError) as error:
                raise InvalidConfigError(
                    f"model {type(self._plain.model).__name__}: its decode step cannot be recorded"
                    f" as a CUDA graph ({error}); enable_cuda_graphs=False runs it kernel by kernel"
                ) from error


class _RecordedStep:
    """One recorded decode step, for up to so many rows."""

    def __init__(
        self,
        runner: ModelRunner | DecodeChain,
        cache: ChunkCache,
        plan: Any,
        tokens: TokenFeed,
    ) -> None:
        """Record it with a plan of that many padding rows."""
        rows = plan.num_rows
        # The recording reads this where it is, so that it has to stay.
        self._every_row = torch.arange(rows, device=tokens.picked.device)
        self._captured = cache.capture(plan)
        captured = self._captured
        with captured:
            if isinstance(runner, DecodeChain):
                self._logits = runner.run(
                    plan,
                    tokens.sources[:rows],
                    tokens.picked,
                    captured.positions,
                    captured.slot_mapping,
                )
            else:
                self._logits = runner.forward(
                    plan, tokens.token_ids(rows), captured.positions, self._every_row
                )
            tokens.picked[:rows].copy_(best_tokens(self._logits))

    def replay(self, step: StepInput, tokens: TokenFeed) -> torch.Tensor:
        """Compute a step of no more rows, and return the logits of all rows."""
        tokens.load(step.tokens)
        self._captured.replay(step.plan)
        return self._logits
