"""Shared-prefix K/V cache with two-phase attention.

`PrefixTree` shares equal prompt prefixes, per chunk, without any K/V: for schedulers and routers.
`ChunkCache` adds the K/V of all layers and attention over it. `chunkcache.attention` runs the same
attention over paged caches that others keep, and `chunkcache.reference` explains it in numpy.
`LLM` serves Hugging Face models over the cache; it needs the extra `hf`.
"""

from typing import TYPE_CHECKING, Any

from chunkcache._core import (
    ChunkCopy,
    Committed,
    ForkResult,
    Inherited,
    InsertResult,
    Plan,
    PrefixMatch,
    PrefixTree,
    SequenceInfo,
    Stats,
    TruncateResult,
    __version__,
)
from chunkcache.cache import ChunkCache
from chunkcache.errors import (
    ChunkCacheError,
    EngineError,
    InvalidConfigError,
    KernelError,
    OutOfChunksError,
    StalePlanError,
    UnknownSequenceError,
)

if TYPE_CHECKING:
    from chunkcache.engine import LLM, AsyncLLM, SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "ChunkCache",
    "ChunkCacheError",
    "ChunkCopy",
    "Committed",
    "EngineError",
    "ForkResult",
    "Inherited",
    "InsertResult",
    "InvalidConfigError",
    "KernelError",
    "OutOfChunksError",
    "Plan",
    "PrefixMatch",
    "PrefixTree",
    "SamplingParams",
    "SequenceInfo",
    "StalePlanError",
    "Stats",
    "TruncateResult",
    "UnknownSequenceError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # The engine needs torch and transformers; the rest of the package numpy alone.
    if name in ("LLM", "AsyncLLM", "SamplingParams"):
        from chunkcache import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
