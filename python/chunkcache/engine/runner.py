"""Runs a model on one packed row of tokens, over the chunk cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from chunkcache import ChunkCache, Plan
from chunkcache.engine.attention import AttentionCall, attending
from chunkcache.engine.device import to_device
from chunkcache.engine.inspection import accepts
from chunkcache.engine.lora import AdapterRows, Adapters


@dataclass(frozen=True, slots=True)
class StepInput:
    """The tokens of one step.

    Attributes:
        plan: the step's plan in the cache, open.
        token_ids: int64 ``[rows]``, the new tokens of each sequence, one sequence after the other,
            on the model's device.
        logits_rows: int64 ``[wanted]``, the rows whose logits are wanted, on the model's device.
        adapter_rows: the rows that a LoRA adapter acts on.
        is_decode: whether each sequence has one row.
        takes_all_rows: whether ``logits_rows`` are all rows in their order.
    """

    plan: Plan
    token_ids: torch.Tensor
    logits_rows: torch.Tensor
    adapter_rows: Sequence[AdapterRows] = ()
    is_decode: bool = False
    takes_all_rows: bool = False


class ModelRunner:
    """A model and the cache that holds its K/V."""

    def __init__(
        self,
        model: Any,
        cache: ChunkCache,
        adapters: Adapters | None = None,
        *,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        """Keep them; the model's weights stay where and as they are.

        Args:
            model: the model.
            cache: what holds its K/V.
            adapters: its LoRA adapters.
            forward: what is called in place of the model, such as a compiled form of it.
        """
        self.model = model
        self._forward = model if forward is None else forward
        self.cache = cache
        self._adapters = adapters
        self._selects_rows = accepts(model, "logits_to_keep")

    @property
    def device(self) -> torch.device:
        """Return where the tokens of a step are expected and the logits come."""
        device: torch.device = self.model.device
        return device

    def run(self, step: StepInput, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Compute a step and write its K/V. Its plan stays open, for the caller to commit or close.

        Args:
            step: what to compute.
            positions: int64 ``[rows]`` on the model's device; the plan's own by default.

        Returns:
            Logits ``[wanted, vocab_size]`` in the model's dtype.
        """
        if positions is None:
            positions = to_device(step.plan.positions, self.device)
        attention = _CacheAttention(self.cache, step.plan)
        selection = {"logits_to_keep": step.logits_rows} if self._selects_rows else {}
        with (
            torch.inference_mode(),
            attending(self.model, attention),
            self._applied(step.adapter_rows),
        ):
            logits: torch.Tensor = self._forward(
                input_ids=step.token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                **selection,
            ).logits[0]
        return logits if self._selects_rows else logits[step.logits_rows]

    def _applied(self, rows: Sequence[AdapterRows]) -> AbstractContextManager[None]:
        return nullcontext() if self._adapters is None else self._adapters.applied(rows)


class _CacheAttention:
    """Layer attention that writes the step's K/V to the cache and attends over its plan."""

    def __init__(self, cache: ChunkCache, plan: Any) -> None:
        self._cache = cache
        self._plan = plan

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        layer = call.layer
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        self._cache.write_kv(layer, k, v, self._plan)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._cache.attend(
            layer,
            q,
            self._plan,
            sm_scale=call.scaling,
            logits_soft_cap=call.softcap,
            window_left=-1 if call.sliding_window is None else call.sliding_window - 1,
            out=out,
        )
        return out[None]
