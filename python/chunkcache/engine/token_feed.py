"""The tokens of recorded steps: they go from one step to the next without leaving the device."""

from __future__ import annotations

import numpy as np
import torch

from chunkcache.engine.device import to_device
from chunkcache.engine.runner import NewTokens


class TokenFeed:
    """Where recorded steps find their tokens and leave those that they pick.

    Attributes:
        sources: int64 ``[max_rows]``: where a row's token comes from: ``picked[i]`` for i >= 0,
            else it is ``-1 - i`` itself.
        picked: int64 ``[max_rows]``, what was picked last; `NO_TOKEN` where the logits are not
            finite.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        """Allocate them; recorded steps read them where they are."""
        self.sources = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self.picked = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def load(self, tokens: NewTokens) -> None:
        """Say where the tokens of the next step come from."""
        sources = -1 - tokens.ids
        if tokens.picked is not None and len(tokens.pending_rows):
            picks = tokens.pending_picks
            if tokens.picked.data_ptr() != self.picked.data_ptr():
                # They come from a step that was not recorded, or are picked from in another order.
                chosen = tokens.picked[to_device(picks, tokens.device)]
                picks = np.arange(len(picks))
                self.picked[: len(picks)].copy_(chosen)
            sources[tokens.pending_rows] = picks
        self.sources[: len(sources)].copy_(to_device(sources, tokens.device))

    def token_ids(self, rows: int) -> torch.Tensor:
        """Return the tokens of the first rows, for a step that is being recorded."""
        sources = self.sources[:rows]
        picked = self.picked[sources.clamp(min=0)].clamp(min=0)
        return torch.where(sources < 0, -1 - sources, picked)
