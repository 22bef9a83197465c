"""The logits that tokens were picked from, and those of one forward pass over the whole text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from unittest.mock import patch

import torch

from chunkcache.engine import LLM
from chunkcache.engine.picker import TokenPicker
from chunkcache.engine.sequence import Request, Sequence

Seen: TypeAlias = dict[int, list[torch.Tensor]]


@contextmanager
def watched_logits() -> Iterator[Seen]:
    """Collect the logits of every pick inside the context, by the identity of its state."""
    seen: Seen = {}
    pick = TokenPicker.pick

    def watching(self: TokenPicker, logits: torch.Tensor, picks: Any) -> Any:
        for each in picks:
            seen.setdefault(id(each.state), []).append(logits[each.row].float().cpu())
        return pick(self, logits, picks)

    with patch.object(TokenPicker, "pick", watching):
        yield seen


def serve_all(llm: LLM, requests: list[Request]) -> None:
    """Run requests that come in two waves, the second while the first decodes."""
    half = len(requests) // 2
    llm.engine.add(requests[:half])
    for _ in range(5):
        llm.engine.step()
    llm.engine.add(requests[half:])
    while llm.engine.num_unfinished:
        llm.engine.step()
    for request in requests:
        assert request.error is None
    llm.check_accounts()


def found_logits(sequence: Sequence, seen: Seen) -> torch.Tensor:
    """Return what the tokens of a sequence were picked from, ``[tokens, vocab_size]``."""
    return torch.stack(seen[id(sequence.state)][: len(sequence.output.token_ids)])


def expected_logits(model: Any, sequence: Sequence) -> torch.Tensor:
    """Return what ``model`` itself says at the places of a sequence's tokens."""
    prompt = list(sequence.request.prompt_token_ids)
    ids = torch.tensor([[*prompt, *sequence.output.token_ids[:-1]]], device=model.device)
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids).logits[0, len(prompt) - 1 :]
    return logits.float().cpu()


def relative_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return for each row the largest error over the largest value."""
    return (found - expected).abs().amax(1) / expected.abs().amax(1)
