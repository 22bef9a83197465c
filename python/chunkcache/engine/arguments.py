"""The arguments of `LLM` and of its `generate`: what is allowed, and what it stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

import torch

from chunkcache import _arrays
from chunkcache.engine.config import EngineConfig, ModelSpec
from chunkcache.engine.device import resolve_device
from chunkcache.engine.params import SamplingParams
from chunkcache.engine.texts import check_text
from chunkcache.errors import InvalidConfigError
from chunkcache.kernels.tpp import FP8_CAPABILITY

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `EngineConfig`; refuse other names."""
    allowed = [field.name for field in dataclasses.fields(EngineConfig)]
    for name, value in options.items():
        if name not in allowed:
            raise InvalidConfigError(
                f"{name} is {value!r}, but LLM has no such argument; allowed are model, tokenizer, "
                f"dtype, device, lora_adapters, {', '.join(allowed)}"
            )
    return options


def check_adapters(adapters: Any) -> dict[str, Path]:
    """Return the folder of each LoRA adapter."""
    given = {} if adapters is None else adapters
    allowed = "None, or a dict of names and folders"
    if not isinstance(given, Mapping):
        raise InvalidConfigError(f"lora_adapters is {adapters!r}; allowed is {allowed}")
    for name, path in given.items():
        if not isinstance(name, str) or not name or not isinstance(path, (str, Path)):
            raise InvalidConfigError(f"lora_adapters has {name!r}: {path!r}; allowed is {allowed}")
        check_text("lora_adapters", name)
    return {name: Path(path).expanduser() for name, path in given.items()}


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse what is not a tokenizer."""
    import transformers

    if tokenizer is not None and not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        raise InvalidConfigError(
            f"tokenizer is a {type(tokenizer).__name__}; "
            "allowed is None or a Hugging Face tokenizer"
        )


def torch_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return the dtype of a name; "auto" stays as it is."""
    if isinstance(dtype, str) and dtype == "auto":
        return dtype
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in _DTYPES:
        raise InvalidConfigError(
            f"dtype is {dtype!r}; allowed is float32, bfloat16, float16 or auto"
        )
    return found


def check_loaded(
    model: Any, dtype: str | torch.dtype | None, device: str | torch.device | None
) -> Any:
    """Return a loaded model, ready for inference, if it is of that dtype and on that device."""
    import transformers

    if not isinstance(model, transformers.PreTrainedModel):
        raise InvalidConfigError(
            f"model is a {type(model).__name__}; allowed is a path, a name or a PreTrainedModel"
        )
    wanted = None if dtype is None else torch_dtype(dtype)
    if wanted not in (None, "auto", model.dtype):
        raise InvalidConfigError(
            f"dtype is {dtype!r}, but the loaded model is in {model.dtype}; "
            f"allowed is to leave it out, or to convert the model with model.to({wanted}) first"
        )
    if device is not None and resolve_device(device) != resolve_device(model.device):
        raise InvalidConfigError(
            f"device is {str(device)!r}, but the loaded model is on {model.device}; "
            f"allowed is to leave it out, or to move the model with model.to({str(device)!r}) first"
        )
    loaded: Any = model
    loaded.eval()
    return loaded


def max_model_len(config: EngineConfig, spec: ModelSpec, capacity: int) -> int:
    """Return how long a prompt with its continuation may be."""
    limit = spec.max_model_len
    if config.max_model_len is None:
        return capacity * config.chunk_size if limit is None else limit
    if limit is not None and config.max_model_len > limit:
        raise InvalidConfigError(
            f"max_model_len is {config.max_model_len}; allowed for this model is at most {limit}"
        )
    return config.max_model_len


def params_for_each(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Return the parameters of each prompt, from one for all or a list of them."""
    if params is None:
        params = SamplingParams()
    if not isinstance(params, (SamplingParams, list, tuple)):
        raise InvalidConfigError(
            f"sampling_params is a {type(params).__name__}; "
            "allowed is SamplingParams, or a list of them, one for each prompt"
        )
    each = [params] * num_prompts if isinstance(params, SamplingParams) else list(params)
    for item in each:
        if not isinstance(item, SamplingParams):
            raise InvalidConfigError(
                f"sampling_params has a {type(item).__name__}; allowed is SamplingParams"
            )
    if len(each) != num_prompts:
        raise InvalidConfigError(
            f"sampling_params has {len(each)} entries for {num_prompts} prompts; "
            "allowed is one for all, or one for each"
        )
    return each


def for_each(
    name: str, values: Any, kind: type | UnionType, num_prompts: int, check: Callable[[Any], None]
) -> list[Any]:
    """Return a value for each prompt, from one for all or a sequence of them, each checked."""
    is_one = isinstance(values, kind) or not isinstance(values, Sequence)
    each = [values] * num_prompts if is_one else list(values)
    for value in each if not is_one else [values]:
        check(value)
    if len(each) != num_prompts:
        raise InvalidConfigError(
            f"{name} has {len(each)} entries for {num_prompts} prompts; "
            "allowed is one for all, or one for each"
        )
    return each


def check_salt(cache_salt: Any) -> None:
    """Refuse a cache_salt that is not a str."""
    if not isinstance(cache_salt, str):
        raise InvalidConfigError(f"cache_salt is {cache_salt!r}; allowed is a str")
    check_text("cache_salt", cache_salt)


def check_priority(priority: Any) -> None:
    """Refuse a priority that is not an int."""
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidConfigError(f"priority is {priority!r}; allowed is an int")


def check_on_device(config: EngineConfig, device: torch.device) -> None:
    """Refuse options that the device that the model is to be on does not serve.

    Raises:
        InvalidConfigError: one is given.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if not config.keeps_model_dtype and capability < FP8_CAPABILITY:
            raise InvalidConfigError(
                f"kv_cache_dtype is {_arrays.described(config.kv_cache_dtype)}; allowed on a "
                f"device of compute capability {'.'.join(map(str, capability))} is 'auto', fp8 "
                f"needs {'.'.join(map(str, FP8_CAPABILITY))} or more"
            )
        return
    if config.compile_model:
        raise InvalidConfigError("compile_model is True; allowed on the CPU is False")
    if not config.keeps_model_dtype:
        raise InvalidConfigError(
            f"kv_cache_dtype is {_arrays.described(config.kv_cache_dtype)}; "
            "allowed on the CPU is 'auto'"
        )


def check_parts(model: Any, tensor_parallel_size: int) -> None:
    """Check that a loaded model is split as it is to be."""
    size = getattr(model, "tp_size", None) or 1
    if size != tensor_parallel_size:
        raise InvalidConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}, but the loaded model is in {size} "
            f"parts; allowed is {size}"
        )
