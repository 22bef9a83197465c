"""Draws tokens from logits on their device, as `chunkcache.engine.sampler` does on the host.

All in float64 and by the same rules, so that a token differs from the host's only where its draw is
as close to a boundary as float64 rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from chunkcache.engine.device import to_device
from chunkcache.engine.params import SamplingParams


def sample_rows(
    logits: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float]
) -> torch.Tensor:
    """Draw a token from each row; nothing waits for the device.

    Args:
        logits: ``[rows, vocab_size]``, any float dtype, finite.
        params: of each row: temperature, min_p, top_k and top_p; temperatures are above 0.
        draws: of each row, in [0, 1).

    Returns:
        int64 ``[rows]``, arbitrary where a row's logits are not finite.
    """
    table = np.array([[p.temperature, p.min_p, p.top_k, p.top_p] for p in params])
    size = logits.shape[1]
    cuts = ((table[:, 2] > 0) & (table[:, 2] < size)) | (table[:, 3] < 1)
    temperature, min_p, top_k, top_p, draw = to_device(
        np.column_stack([table, draws]).T, logits.device
    )[:, :, None]
    values = logits.double()
    weights = torch.exp((values - values.amax(dim=1, keepdim=True)) / temperature)
    weights = torch.where(weights < min_p, 0, weights)
    if cuts.any():
        weights = _most_probable(weights, top_k, top_p)
    cumulative = weights.cumsum(dim=1)
    # The host's are shares of their sum: a draw is compared with them in the same proportion.
    total = cumulative[:, -1:]
    target = torch.minimum(draw * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=size - 1)


def _most_probable(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the weights that top_k and top_p keep, 0 for the others."""
    size = weights.shape[1]
    ordered, token_ids = weights.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(size, device=weights.device)
    kept = torch.where((top_k > 0) & (rank >= top_k), 0, ordered)
    before = kept.cumsum(dim=1) - kept
    kept = torch.where((top_p < 1) & (before >= top_p * kept.sum(dim=1, keepdim=True)), 0, kept)
    return torch.zeros_like(weights).scatter(1, token_ids, kept)
