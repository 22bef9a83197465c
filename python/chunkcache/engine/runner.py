"""Runs a model on one packed row of tokens, over the chunk cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chunkcache import ChunkCache, Plan
from chunkcache.engine.attention import AttentionCall, attending
from chunkcache.engine.device import to_device
from chunkcache.engine.inspection import accepts
from chunkcache.engine.lora import AdapterRows, Adapters
from chunkcache.engine.picker import best_tokens


def _none() -> npt.NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The new tokens of a step, of which some may be known to the device only.

    Attributes:
        ids: int64 ``[rows]``, the new tokens of each sequence, one sequence after the other.
        device: the model's.
        pending_rows: int64 ``[pending]``, the rows whose token is one that the step before picked.
        pending_picks: int64 ``[pending]``, which of ``picked`` each of those is.
        picked: int64 on the model's device, what the step before picked; None if nothing pends.
    """

    ids: npt.NDArray[np.int64]
    device: torch.device
    pending_rows: npt.NDArray[np.int64] = field(default_factory=_none)
    pending_picks: npt.NDArray[np.int64] = field(default_factory=_none)
    picked: torch.Tensor | None = None

    def on_device(self) -> torch.Tensor:
        """Return all of them, int64 ``[rows]`` on the device."""
        token_ids = to_device(self.ids, self.device)
        if self.picked is not None and len(self.pending_rows):
            pending = self.picked[to_device(self.pending_picks, self.device)]
            # A pick that failed has ended its sequence; any token will do until that is known.
            token_ids[to_device(self.pending_rows, self.device)] = pending.clamp(min=0)
        return token_ids


@dataclass(frozen=True, slots=True)
class StepInput:
    """The tokens of one step.

    Attributes:
        plan: the step's plan in the cache, open.
        tokens: its new tokens.
        logits_rows: int64 ``[wanted]``, the rows whose logits are wanted.
        adapter_rows: the rows that a LoRA adapter acts on.
        is_decode: whether each sequence has one row.
        takes_all_rows: whether ``logits_rows`` are all rows in their order.
    """

    plan: Plan
    tokens: NewTokens
    logits_rows: npt.NDArray[np.int64]
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

    def run(self, step: StepInput) -> torch.Tensor:
        """Compute a step and write its K/V. Its plan stays open, for the caller to commit or close.

        Args:
            step: what to compute.

        Returns:
            Logits ``[wanted, vocab_size]`` in the model's dtype.
        """
        with self._applied(step.adapter_rows):
            return self.forward(
                step.plan,
                step.tokens.on_device(),
                to_device(step.plan.positions, self.device),
                to_device(step.logits_rows, self.device),
            )

    def best_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the best token of each row; see `best_tokens`."""
        return best_tokens(logits)

    def forward(
        self,
        plan: Plan,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a step of tokens that are on the model's device.

        Args:
            plan: the step's plan.
            token_ids: int64 ``[rows]``.
            positions: int64 ``[rows]``.
            logits_rows: int64 ``[wanted]``.

        Returns:
            Logits ``[wanted, vocab_size]`` in the model's dtype.
        """
        attention = _CacheAttention(self.cache, plan)
        selection = {"logits_to_keep": logits_rows} if self._selects_rows else {}
        with torch.inference_mode(), attending(self.model, attention):
            logits: torch.Tensor = self._forward(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                **selection,
            ).logits[0]
        return logits if self._selects_rows else logits[logits_rows]

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
