"""Tiny random models, and the comparison of texts that the design asks for."""

from __future__ import annotations

import os

# The tests must pass without a network, and say so at once when they would use it.
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
import torch
import transformers

# Models this small only lose by it.
torch.set_num_threads(1)

VOCAB_SIZE = 300
CLOSE_LOGITS = 1e-4

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON),
    "mistral": lambda: transformers.MistralConfig(**_COMMON, sliding_window=20),
    "qwen2": lambda: transformers.Qwen2Config(**_COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON, head_dim=24),
    "gemma2": lambda: transformers.Gemma2Config(
        **_COMMON,
        head_dim=16,
        sliding_window=20,
        attn_logit_softcapping=1.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=32,
    ),
    "phi3": lambda: transformers.Phi3Config(**_COMMON),
}


@pytest.fixture(params=sorted(_CONFIGS))
def tiny_model(request: pytest.FixtureRequest) -> Any:
    """One tiny random model after the other."""
    return make_model(_CONFIGS[request.param]())


@pytest.fixture
def llama() -> Any:
    """A tiny random Llama."""
    return make_model(_CONFIGS["llama"]())


@pytest.fixture
def build_model() -> Callable[[Any], Any]:
    """Turn a configuration into a random model."""
    return make_model


def make_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    # The usual initialisation is so small that all positions would look alike.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    return model


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A tokenizer with one token for each byte, an end token and a chat template."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    fast.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return fast


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
