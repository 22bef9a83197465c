"""Records a decode step as a chain of our own kernels, for models built as Llama is.

A layer is nine launches, the attention and eight of `chunkcache.kernels.decode`, each of which
starts while the one before it ends; weights are read where the model has them.
"""

from __future__ import annotations

from typing import Any

import torch

from chunkcache import ChunkCache
from chunkcache.engine.decode_stack import DecodeStack, Layer
from chunkcache.kernels.decode import (
    MAX_WIDTH,
    DecodeKernels,
    HeadNorms,
    Pages,
    Parts,
    Rotation,
    compiled_rows,
)
from chunkcache.kernels.driver import limits

_HOPPER = (9, 0)
#: Weight rows, and columns of what lies between the products, are taken so many at a time.
_VECTOR = 8


def can_chain(stack: DecodeStack, cache: ChunkCache) -> bool:
    """Return whether the kernels take a model's sizes, its dtype and its device."""
    device = stack.embedding.device
    if device.type != "cuda" or limits(device.index).capability != _HOPPER:
        return False
    layer = stack.layers[0]
    pieces = stack.head_dim // _VECTOR
    sizes = [stack.head_dim, *(size for weight in _weights(layer) for size in weight.shape)]
    return (
        str(stack.embedding.dtype).removeprefix("torch.") == cache.dtype
        and cache.kv_layer(0).dtype == stack.embedding.dtype
        and stack.embedding.shape[1] <= MAX_WIDTH
        and not any(size % _VECTOR for size in sizes)
        and (layer.head_norms is None or pieces in (1, 2, 4, 8, 16, 32))
    )


def _weights(layer: Layer) -> list[torch.Tensor]:
    return [*layer.qkv, layer.output, *layer.gate_up, layer.down]


class DecodeChain:
    """Launches decode steps of a model; one after another uses its buffers."""

    def __init__(self, stack: DecodeStack, cache: ChunkCache, row_counts: list[int]) -> None:
        """Allocate what lies between the launches.

        Args:
            stack: the model, of which `can_chain` is true.
            cache: what holds its K/V.
            row_counts: the numbers of rows of the steps that come, up to `MAX_ROWS`.
        """
        self._stack = stack
        self._cache = cache
        self._device = stack.embedding.device
        self._rotation = Rotation(stack.cosine, stack.sine)
        layer = stack.layers[0]
        width, inner = layer.down.shape
        self._parts = torch.empty(
            max(
                DecodeKernels.num_part_values(weights, rows, self._device.index)
                for weights in (layer.qkv, (layer.output,), layer.gate_up, (layer.down,))
                for rows in row_counts
            ),
            dtype=torch.float32,
            device=self._device,
        )
        rows = compiled_rows(max(row_counts))
        self._num_qo_heads = layer.qkv[0].shape[0] // stack.head_dim
        self._hidden = self._buffer(rows, width)
        self._x = self._buffer(rows, width)
        self._q = self._buffer(rows, layer.qkv[0].shape[0])
        self._attended = self._buffer(rows, layer.output.shape[1])
        self._inner = self._buffer(rows, inner)
        self._pages = [
            Pages(kv[:, 0], kv[:, 1]) for kv in map(cache.kv_layer, range(len(stack.layers)))
        ]

    def _buffer(self, rows: int, columns: int) -> torch.Tensor:
        # What is in rows beyond those of a step makes no difference, but may not be NaN for ever.
        return torch.zeros(rows, columns, dtype=self._stack.embedding.dtype, device=self._device)

    def run(
        self,
        plan: Any,
        sources: torch.Tensor,
        picked: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Launch a step on torch's current stream.

        Args:
            plan: the step's plan.
            sources: int64 ``[rows]``, for each row the index of its token in ``picked``, or ``-1 -
                token``.
            picked: int64, the tokens that the step before picked.
            positions: int64 ``[rows]``.
            slot_mapping: int64 ``[rows]``.

        Returns:
            Logits ``[rows, vocab_size]``.
        """
        rows = len(sources)
        stack = self._stack
        kernels = DecodeKernels(rows, self._parts)
        padded = kernels.padded_rows
        hidden, x, inner = (each[:padded] for each in (self._hidden, self._x, self._inner))
        attended = self._attended[:padded]
        heads = (-1, self._num_qo_heads, stack.head_dim)
        q = self._q[:rows].view(heads)
        norms = [layer.input_norm for layer in stack.layers[1:]] + [stack.norm]
        first = stack.layers[0].input_norm
        kernels.embed(sources, picked, stack.embedding, hidden, first.weight, first.epsilon, x)
        for layer, pages, next_norm in zip(stack.layers, self._pages, norms, strict=True):
            kernels.rotate(
                kernels.product(layer.qkv, x),
                layer.biases,
                _head_norms(layer),
                self._rotation,
                positions,
                slot_mapping,
                q,
                pages,
            )
            call = layer.call
            self._cache.attend(
                call.layer,
                q,
                plan,
                sm_scale=call.scaling,
                logits_soft_cap=call.softcap,
                window_left=-1 if call.sliding_window is None else call.sliding_window - 1,
                out=attended[:rows].view(heads),
            )
            parts: Parts = kernels.product((layer.output,), attended)
            norm = layer.inner_norm
            kernels.add_and_normalize(parts, hidden, norm.weight, norm.epsilon, x)
            kernels.gate(kernels.product(layer.gate_up, x), inner)
            parts = kernels.product((layer.down,), inner)
            kernels.add_and_normalize(parts, hidden, next_norm.weight, next_norm.epsilon, x)
        return torch.nn.functional.linear(x[:rows], stack.head)


def _head_norms(layer: Layer) -> HeadNorms | None:
    if layer.head_norms is None:
        return None
    q, k = layer.head_norms
    return HeadNorms(q.weight, k.weight, q.epsilon)
