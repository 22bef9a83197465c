"""The models that the benchmark serves."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from chunkcache.engine import LLM, SamplingParams, loader
from chunkcache.engine.quiet import without_progress_bars
from chunkcache.errors import InvalidConfigError

LLAMA_2_7B = "llama-2-7b-shape"
"""Llama 2 7B with random weights: its times are those of the real one."""

_DTYPES = ("float32", "bfloat16", "float16")


def load(name: str, dtype: str, device: str) -> Any:
    """Load a model, or make `LLAMA_2_7B`.

    Args:
        name: what `LLM` takes as a name or path, or `LLAMA_2_7B`.
        dtype: "float32", "bfloat16" or "float16".
        device: "cpu" or "cuda".

    Raises:
        InvalidConfigError: there is no such model, dtype or device, or the engine does not run on
            the device.
    """
    if dtype not in _DTYPES:
        raise InvalidConfigError(f"dtype is {dtype!r}; allowed is {', '.join(_DTYPES)}")
    if device == "cuda":
        require_engine_on_gpu()
    elif device != "cpu":
        raise InvalidConfigError(f"device is {device!r}; allowed is cpu or cuda")
    torch_dtype = getattr(torch, dtype)
    if name == LLAMA_2_7B:
        return random_model(llama_2_7b(), torch_dtype, device)
    return loader.load_model(loader.resolve(name), torch_dtype, device)


def llama_2_7b() -> Any:
    """Return the configuration of Llama 2 7B, with room for the paper's longest row."""
    return transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        # The paper's longest sequence has 4,608 tokens; the published model ends at 4,096.
        max_position_embeddings=8192,
    )


def random_model(config: Any, dtype: torch.dtype, device: str) -> Any:
    """Make a model of a configuration, on its device, with the same random weights each time."""
    auto_model: Any = transformers.AutoModelForCausalLM
    with without_progress_bars(), torch.device(device), torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto_model.from_config(config, dtype=dtype)
    return model.eval()


def require_engine_on_gpu() -> None:
    """Serve a tiny model on the GPU, to find out at once if that works.

    Raises:
        InvalidConfigError: it does not; nothing is run on the CPU instead.
    """
    if not torch.cuda.is_available():
        raise InvalidConfigError(
            "device is 'cuda', but torch finds no CUDA device here; allowed is cpu"
        )
    config = transformers.LlamaConfig(
        vocab_size=64,
        # Two heads of 128 elements: the kernels of that size are needed for most models anyway.
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    try:
        llm = LLM(random_model(config, torch.float16, "cuda"), None, capacity=64, max_num_seqs=4)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), progress=False)
    except Exception as error:
        raise InvalidConfigError(
            "device is 'cuda', but the engine does not run on the GPU "
            f"({type(error).__name__}: {error}); allowed is cpu"
        ) from error
