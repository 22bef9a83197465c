"""A model served through the cache, compared with its own eager attention.

Reading configurations cannot find every kind of attention that differs from the standard one. So a
short random prompt is computed both ways before a model is served: over the cache in pieces, packed
with a second prompt that shares its first chunks, and in one go by the model's eager attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from chunkcache import ChunkCache
from chunkcache.engine.attention import implementation
from chunkcache.engine.config import ModelSpec
from chunkcache.engine.inspection import refused
from chunkcache.engine.runner import ModelRunner, NewTokens, StepInput

_CHUNK_SIZE = 16
_NUM_TOKENS = 45
_NUM_SHARED = 35
# Longer sliding windows are cut to this for the probe, so that a short prompt is longer than they.
_WINDOW = 24
# Allowed max|logits - eager| / max|eager| of a row, and the share of rows held to it: in half
# precision a mixture of experts may route a token differently without anything being wrong.
_LIMITS = {"float32": (1e-3, 1.0), "bfloat16": (1e-1, 0.75), "float16": (5e-2, 0.75)}


def probe(model: Any, spec: ModelSpec) -> None:
    """Compare the logits of ``model`` over the cache with those of its eager attention.

    Raises:
        InvalidConfigError: they differ, so that the model would be served wrongly.
    """
    generator = np.random.default_rng(0)
    first, second = generator.integers(spec.vocab_size, size=(2, _NUM_TOKENS))
    second[:_NUM_SHARED] = first[:_NUM_SHARED]
    with _short_windows(model):
        expected = np.concatenate([_eager_logits(model, first), _eager_logits(model, second)])
        served = _served_logits(model, spec, first, second)
    errors = np.abs(served - expected).max(axis=1) / np.abs(expected).max(axis=1)
    limit, share = _LIMITS[spec.dtype]
    # A NaN is no match either.
    worst = float(np.quantile(errors, share))
    if not worst <= limit:
        raise refused(
            model,
            f"its logits over the cache are off by {worst:.1e} of their size against its own "
            "eager attention, so its attention is not the standard one",
        )


def _served_logits(
    model: Any, spec: ModelSpec, first: np.ndarray, second: np.ndarray
) -> np.ndarray:
    cache = ChunkCache(
        spec.num_layers,
        spec.num_kv_heads,
        spec.head_dim,
        dtype=spec.dtype,
        chunk_size=_CHUNK_SIZE,
        capacity=2 * (_NUM_TOKENS // _CHUNK_SIZE + 1),
        device=str(model.device),
    )
    runner = ModelRunner(model, cache)
    # The second prompt finds the first's leading chunks, whose logits it then lacks.
    one = cache.insert(first)
    head = _run(runner, [one.seq], [first[:_NUM_SHARED]])
    two = cache.insert(second)
    rest = _run(
        runner, [two.seq, one.seq], [second[two.num_computed_tokens :], first[_NUM_SHARED:]]
    )
    num_second = _NUM_TOKENS - two.num_computed_tokens
    rows = [head, rest[num_second:], head[: two.num_computed_tokens], rest[:num_second]]
    return _to_numpy(torch.cat(rows))


def _run(runner: ModelRunner, handles: list[int], pieces: list[np.ndarray]) -> torch.Tensor:
    token_ids = np.concatenate(pieces).astype(np.int64)
    tokens = NewTokens(token_ids, runner.device)
    with runner.cache.plan(handles, np.cumsum([0, *map(len, pieces)])) as plan:
        logits = runner.run(StepInput(plan, tokens, np.arange(len(token_ids))))
        runner.cache.commit(plan)
    return logits


def _eager_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    device = model.device
    with torch.inference_mode(), implementation(model, "eager"):
        logits = model(
            input_ids=torch.from_numpy(tokens).to(device)[None],
            position_ids=torch.arange(len(tokens), device=device)[None],
            use_cache=False,
        ).logits[0]
    return _to_numpy(logits)


def _to_numpy(logits: torch.Tensor) -> np.ndarray:
    return logits.float().cpu().numpy()


@contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Cut the sliding windows of ``model`` to `_WINDOW` inside the context."""
    holders = [model.config.get_text_config(), *model.modules()]
    previous = [
        (holder, holder.sliding_window)
        for holder in holders
        if isinstance(getattr(holder, "sliding_window", None), int)
        and holder.sliding_window > _WINDOW
    ]
    for holder, _ in previous:
        holder.sliding_window = _WINDOW
    try:
        yield
    finally:
        for holder, window in previous:
            holder.sliding_window = window
