"""The attention function that Hugging Face models call instead of their own.

transformers looks its attention functions up by the name in ``config._attn_implementation``. One
name is registered here; while a model runs inside `attending`, that name stands in its
configuration and every layer's call goes to the given `LayerAttention`. Outside, the model is as
it was, so that a caller may go on using it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import transformers

IMPLEMENTATION = "chunkcache"
"""The name under which transformers finds the attention function."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks for, beside its tensors.

    Attributes:
        module: the layer's attention module.
        layer: the layer's number, from 0.
        scaling: factor of the scores; None for ``1 / sqrt(head_dim)``.
        sliding_window: keys that a query sees, its own included; None for all earlier ones.
        softcap: cap of the scores, ``softcap * tanh(scores / softcap)``; None for none.
        attention_mask: the mask that the model made, None if it made none.
        extra: every other argument of the call.
    """

    module: torch.nn.Module
    layer: int
    scaling: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    attention_mask: torch.Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class LayerAttention(Protocol):
    """Attention of one layer over the tokens of a step."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: ``[1, num_qo_heads, tokens, head_dim]``.
            key: ``[1, num_kv_heads, tokens, head_dim]``.
            value: as ``key``.
            call: the layer and its attention's parameters.

        Returns:
            ``[1, tokens, num_qo_heads, head_dim]``.
        """


_layer_attention: ContextVar[LayerAttention] = ContextVar("chunkcache_layer_attention")
_locks: weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_locks_guard = threading.Lock()


def _attention_function(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    call = AttentionCall(
        module, module.layer_idx, scaling, sliding_window, softcap, attention_mask, extra
    )
    return _layer_attention.get()(query, key, value, call), None


# Without an entry of that name in the mask interface, models make no mask at all.
transformers.AttentionInterface.register(IMPLEMENTATION, _attention_function)


def keep_from_compilation() -> None:
    """Let torch.compile leave the attention function alone: it launches kernels of our own."""
    disable: Any = torch.compiler.disable
    transformers.AttentionInterface.register(IMPLEMENTATION, disable(_attention_function))


@contextmanager
def attending(model: Any, attention: LayerAttention) -> Iterator[None]:
    """Let the layers of ``model`` call ``attention`` inside the context.

    The model is locked meanwhile: another thread that runs the same model waits.
    """
    with implementation(model, IMPLEMENTATION):
        token = _layer_attention.set(attention)
        try:
            yield
        finally:
            _layer_attention.reset(token)


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """Run ``model`` with the attention implementation ``name``, and put back what it had."""
    with _lock_of(model):
        configs = [model.config, *_sub_configs(model.config)]
        previous = [config._attn_implementation for config in configs]
        model.config._attn_implementation = name
        try:
            yield
        finally:
            for config, value in zip(configs, previous, strict=True):
                config._attn_implementation = value


def _lock_of(model: torch.nn.Module) -> threading.RLock:
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())


def _sub_configs(config: Any) -> list[Any]:
    found = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    return [sub_config for sub_config in found if sub_config is not None]
