"""Tiny random models, and the comparison of texts that the design asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from chunkcache_testing.tiny_models import CONFIGS, VOCAB_SIZE, make_model, make_tokenizer

CLOSE_LOGITS = 1e-4


@pytest.fixture(params=sorted(CONFIGS))
def tiny_model(request: pytest.FixtureRequest) -> Any:
    """One tiny random model after the other."""
    return make_model(CONFIGS[request.param]())


@pytest.fixture
def llama() -> Any:
    """A tiny random Llama."""
    return make_model(CONFIGS["llama"]())


@pytest.fixture
def build_model() -> Callable[[Any], Any]:
    """Turn a configuration into a random model."""
    return make_model


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A tokenizer with one token for each byte, an end token and a chat template."""
    return make_tokenizer()


@pytest.fixture
def make_prompt() -> Callable[..., list[int]]:
    """Make a random prompt of the given length, after a common beginning."""

    def make(num_tokens: int, seed: int = 0, prefix: list[int] | None = None) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        tail = torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
        return [*(prefix or []), *tail]

    return make


@pytest.fixture
def expect_generated() -> Callable[..., None]:
    """Check tokens against transformers' own greedy generation.

    Equal up to the first position where the two best logits are closer than `CLOSE_LOGITS`.
    """

    def expect(model: Any, prompt: list[int], tokens: list[int], max_tokens: int) -> None:
        ids = torch.tensor([prompt])
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        expected = result.sequences[0, len(prompt) :].tolist()
        for position, logits in enumerate(result.logits):
            best, second = logits[0].float().topk(2).values.tolist()
            if best - second < CLOSE_LOGITS:
                return
            assert tokens[: position + 1] == expected[: position + 1]
        assert tokens == expected

    return expect
