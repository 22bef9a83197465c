"""Models and a tokenizer small enough to make in a test."""

from __future__ import annotations

import os

# The tests must pass without a network, and say so at once when they would use it.
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable
from typing import Any

import tokenizers
import torch
import transformers

# Models this small only lose by more.
torch.set_num_threads(1)

VOCAB_SIZE = 300

_COMMON: dict[str, Any] = {
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

CONFIGS: dict[str, Callable[[], Any]] = {
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
"""The kinds of model that the engine is tested on."""


def make_model(config: Any) -> Any:
    """Turn a configuration into a random model, the same each time."""
    torch.manual_seed(0)
    # Not every release's other implementations have the soft cap.
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.eval()
    # The usual initialisation is so small that all positions would look alike.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
    return model


def make_tokenizer() -> Any:
    """Make a tokenizer with one token for each byte, an end token and a chat template."""
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
