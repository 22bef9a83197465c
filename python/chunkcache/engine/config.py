"""How an engine is set up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

from chunkcache import _arrays
from chunkcache.engine.texts import shown
from chunkcache.errors import InvalidConfigError
from chunkcache.kernels.scales import check_given

_DEFAULT_TOKEN_BUDGET = 512
_ITEM_SIZE = {**_arrays.ITEM_SIZES, _arrays.FP8: 1}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of an engine and of its cache.

    Args:
        chunk_size: tokens per chunk (a page in FlashInfer, a block in vLLM): a multiple of 16,
            from 16 to 128.
        capacity: size of the K/V pool in chunks.
        capacity_bytes: size of the K/V pool in bytes, instead of ``capacity``.
        memory_fraction: size of the K/V pool as a share of the memory that is free when the engine
            is made, in (0, 1], instead of ``capacity``. With none of the three, the pool may grow
            to what the limits below can use, or to half of the memory that is free.
        max_model_len: most tokens of a prompt and its continuation together; by default what the
            model was made for and the pool can hold.
        max_num_seqs: most sequences that have a place in the cache and run together; no more than
            max_num_batched_tokens do, since each takes one of them.
        max_num_batched_tokens: most tokens that one step computes; 512 by default. A longer prompt
            is computed in pieces, after the tokens of the sequences that are decoding.
        enable_chunked_prefill: False computes each prompt in one step, together with the tokens of
            those that are decoding, which have to wait for it. max_num_batched_tokens then must be
            at least the length of a sequence, and by default is that and max_num_seqs more.
        num_threads: threads of torch and of the attention kernels; by default those that torch
            is set to, which is one per core.
        enable_prefix_sharing: False keeps every sequence's K/V for itself.
        enable_overlap: False plans the next step and makes text between two steps instead of beside
            them. What is computed is the same, bit for bit.
        tensor_parallel_size: processes over which the model and its K/V heads are split, by
            transformers' ``tp_plan``. The program is started as that many (``torchrun``), each of
            which makes the same `LLM`, and the same calls of it in the same order; all get the
            same outputs. For `AsyncLLM` see there. Each takes its own CUDA device if there is one.
        enable_cuda_graphs: False launches the kernels of a decode step one by one on a CUDA device,
            instead of replaying a recording (vLLM's ``enforce_eager``). No meaning on the CPU.
        compile_model: True lets torch.compile fuse the small operations of recorded decode steps
            of models and devices that our own kernels do not serve.
            The first start takes a minute or so longer; needs Triton and a C compiler. Refused on
            the CPU and without CUDA graphs, where it would have no effect.
        kv_cache_dtype: "auto" keeps K and V in the model's dtype, "fp8" (e4m3) in half of its
            bytes, on a CUDA device of compute capability 8.9 or more.
        k_scale: what keys in fp8 are divided by when they are stored: a number, or float32
            ``[num_layers, num_kv_heads]``; 1 by default.
        v_scale: the same for values.
        seed: seeds the generator that gives seeds to requests without one of their own.

    Raises:
        InvalidConfigError: an argument is out of its range.
    """

    chunk_size: int = 64
    capacity: int | None = None
    capacity_bytes: int | None = None
    memory_fraction: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    num_threads: int | None = None
    enable_prefix_sharing: bool = True
    enable_overlap: bool = True
    tensor_parallel_size: int = 1
    enable_cuda_graphs: bool = True
    compile_model: bool = False
    kv_cache_dtype: Any = "auto"
    k_scale: Any = None
    v_scale: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every argument."""
        if not _is_int(self.chunk_size) or self.chunk_size not in range(16, 129, 16):
            raise InvalidConfigError(
                f"chunk_size is {shown(self.chunk_size)}; "
                "allowed is a multiple of 16 from 16 to 128"
            )
        for name in ("max_num_seqs", "tensor_parallel_size"):
            _check_positive(name, getattr(self, name))
        for name in (
            "capacity",
            "capacity_bytes",
            "max_model_len",
            "max_num_batched_tokens",
            "num_threads",
        ):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        for name in (
            "enable_chunked_prefill",
            "enable_prefix_sharing",
            "enable_overlap",
            "enable_cuda_graphs",
            "compile_model",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidConfigError(
                    f"{name} is {shown(getattr(self, name))}; allowed is True or False"
                )
        if not (self.keeps_model_dtype or _arrays.is_fp8(self.kv_cache_dtype)):
            dtype = _arrays.described(self.kv_cache_dtype)
            raise InvalidConfigError(f"kv_cache_dtype is {dtype}; allowed is 'auto' or 'fp8'")
        for name in ("k_scale", "v_scale"):
            scale = getattr(self, name)
            if scale is None:
                continue
            if self.keeps_model_dtype:
                raise InvalidConfigError(
                    f"{name} is {_arrays.described(scale)}; "
                    "allowed is None unless kv_cache_dtype is 'fp8'"
                )
            check_given(name, scale, ("num_layers", "num_kv_heads"))
        if self.compile_model and not self.enable_cuda_graphs:
            raise InvalidConfigError(
                "compile_model is True; allowed with enable_cuda_graphs=False is False"
            )
        _check_fraction("memory_fraction", self.memory_fraction)
        sizes = ("capacity", "capacity_bytes", "memory_fraction")
        given = [name for name in sizes if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidConfigError(f"{' and '.join(given)} are given; allowed is one of them")
        if not _is_int(self.seed) or not 0 <= self.seed < 2**64:
            raise InvalidConfigError(f"seed is {shown(self.seed)}; allowed is an int in [0, 2**64)")

    def kv_dtype(self, model_dtype: str) -> str:
        """Return the dtype of K and V for a model's."""
        return model_dtype if self.keeps_model_dtype else _arrays.FP8

    @property
    def keeps_model_dtype(self) -> bool:
        """Whether K and V are in the model's dtype."""
        return isinstance(self.kv_cache_dtype, str) and self.kv_cache_dtype == "auto"

    def token_budget(self, max_model_len: int) -> int:
        """Return the most tokens of a step, for sequences of at most ``max_model_len`` tokens.

        Raises:
            InvalidConfigError: without chunked prefill it does not hold the longest sequence.
        """
        given = self.max_num_batched_tokens
        if self.enable_chunked_prefill:
            return _DEFAULT_TOKEN_BUDGET if given is None else given
        if given is None:
            return max_model_len + self.max_num_seqs
        if given < max_model_len:
            raise InvalidConfigError(
                f"max_num_batched_tokens is {given}; allowed without chunked prefill is at least "
                f"the length of a sequence, {max_model_len}"
            )
        return given


@dataclass(frozen=True)
class ModelSpec:
    """What the cache, the scheduler and the sampler need to know of a model.

    Attributes:
        num_layers: attention layers, each with K/V of its own.
        num_qo_heads: query heads of a layer.
        num_kv_heads: K/V heads of a layer.
        head_dim: elements of a head, equal for K and V.
        dtype: of weights and activations: "float32", "bfloat16" or "float16".
        vocab_size: rows of the embedding; token ids are below it.
        max_model_len: most tokens that the model's positions are right for; None if unbounded.
        eos_token_ids: the ids that end a text.
    """

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    vocab_size: int
    max_model_len: int | None
    eos_token_ids: frozenset[int]

    def chunk_bytes(self, chunk_size: int, kv_dtype: str | None = None) -> int:
        """Return the bytes of a chunk's K and V of all layers, in the model's dtype by default."""
        elements = 2 * self.num_layers * self.num_kv_heads * chunk_size * self.head_dim
        return elements * _ITEM_SIZE[kv_dtype or self.dtype]


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_positive(name: str, value: object) -> None:
    if not _is_int(value) or value < 1:
        raise InvalidConfigError(f"{name} is {shown(value)}; allowed is an int of at least 1")


def _check_fraction(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value <= 1):
        raise InvalidConfigError(f"{name} is {shown(value)}; allowed is a number in (0, 1]")
