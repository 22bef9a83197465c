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
from chunkcache.engine.fused_norms import fused_norms
from chunkcache.engine.lora import Adapters
from chunkcache.engine.runner import ModelRunner, StepInput
from chunkcache.errors import InvalidConfigError, KernelError

logger = logging.getLogger(__name__)


def row_counts(max_rows: int) -> list[int]:
    """Return the numbers of rows that steps are recorded for: powers of two, then every 32."""
    counts = [1, 2, 4, 8, 16, *range(32, max_rows, 32)]
    return [*(n for n in counts if n < max_rows), max_rows]


class GraphRunner:
    """A `ModelRunner` whose decode steps are CUDA graphs.

    Steps that compute prompts, or rows of a LoRA adapter, run as `ModelRunner` runs them.
    """

    def __init__(
        self,
        model: Any,
        cache: ChunkCache,
        adapters: Adapters | None = None,
        *,
        max_rows: int,
        compiled: bool = False,
    ) -> None:
        """Record decode steps of up to ``max_rows`` sequences.

        Args:
            model: the model.
            cache: what holds its K/V.
            adapters: its LoRA adapters.
            max_rows: the most sequences of a recorded step.
            compiled: whether torch.compile is to fuse what lies between the attention and the
                matrix products.

        Raises:
            InvalidConfigError: the model cannot be recorded, or not be compiled.
        """
        self._plain = ModelRunner(model, cache, adapters)
        self._recorder = self._plain
        if compiled:
            keep_from_compilation()
            self._recorder = ModelRunner(
                model, cache, adapters, forward=torch.compile(model, dynamic=True)
            )
        self._cache = cache
        self._graphs: dict[int, _RecordedStep] = {}
        self._outgrown: set[int] = set()
        # The largest first: the others fit into the memory that it leaves.
        for rows in reversed(row_counts(max_rows)):
            self._graphs[rows] = self._recorded(rows)
        self._counts = sorted(self._graphs)

    @property
    def device(self) -> torch.device:
        """Return where the tokens of a step are expected and the logits come."""
        return self._plain.device

    def run(self, step: StepInput) -> torch.Tensor:
        """Compute a step; see `ModelRunner.run`.

        The logits of a decode step are overwritten by the next one but one of as many rows.
        """
        rows = step.plan.num_rows
        if not step.is_decode or step.adapter_rows or rows > self._counts[-1]:
            return self._plain.run(step)
        recorded_rows = self._counts[bisect_left(self._counts, rows)]
        try:
            logits = self._graphs[recorded_rows].replay(step)
        except KernelError as error:
            if recorded_rows not in self._outgrown:
                self._outgrown.add(recorded_rows)
                logger.warning("decode steps of %d rows run unrecorded: %s", recorded_rows, error)
            return self._plain.run(step)
        return logits[:rows] if step.takes_all_rows else logits[step.logits_rows]

    def _recorded(self, rows: int) -> _RecordedStep:
        try:
            # Libraries set themselves up at first use, which cannot be recorded.
            with self._cache.plan([None] * rows) as plan:
                self._recorder.run(_padding_step(plan, rows, self.device))
            norms = (
                nullcontext()
                if self._recorder is not self._plain
                else fused_norms(self._plain.model)
            )
            with self._cache.plan([None] * rows) as plan, norms:
                return _RecordedStep(self._recorder, plan, rows)
        except (RuntimeError, KernelError) as error:
            raise InvalidConfigError(
                f"model {type(self._plain.model).__name__}: its decode step cannot be recorded as a"
                f" CUDA graph ({error}); enable_cuda_graphs=False runs it kernel by kernel"
            ) from error


class _RecordedStep:
    """One recorded decode step, for up to so many rows."""

    def __init__(self, runner: ModelRunner, plan: Any, rows: int) -> None:
        """Record it with a plan of that many padding rows."""
        # The recording reads these where they are, so that they have to stay.
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=runner.device)
        self._every_row = torch.arange(rows, device=runner.device)
        self._captured = runner.cache.capture(plan)
        with self._captured:
            self._logits = runner.run(
                StepInput(plan, self._token_ids, self._every_row),
                positions=self._captured.positions,
            )

    def replay(self, step: StepInput) -> torch.Tensor:
        """Compute a step of no more rows, and return the logits of all rows."""
        self._token_ids[: len(step.token_ids)].copy_(step.token_ids)
        self._captured.replay(step.plan)
        return self._logits


def _padding_step(plan: Any, rows: int, device: torch.device) -> StepInput:
    token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
    return StepInput(plan, token_ids, torch.arange(rows, device=device))
