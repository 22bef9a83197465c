"""Shared-prefix K/V cache with two-phase attention.

`PrefixTree` shares equal prompt prefixes, per chunk, without any K/V: for schedulers and routers.
`ChunkCache` adds the K/V of all layers and attention over it. `chunkcache.attention` runs the same
attention over paged caches that others keep, and `chunkcache.reference` explains it in numpy.
"""

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
    InvalidConfigError,
    KernelError,
    OutOfChunksError,
    StalePlanError,
    UnknownSequenceError,
)

__all__ = [
    "ChunkCache",
    "ChunkCacheError",
    "ChunkCopy",
    "Committed",
    "ForkResult",
    "Inherited",
    "InsertResult",
    "InvalidConfigError",
    "KernelError",
    "OutOfChunksError",
    "Plan",
    "PrefixMatch",
    "PrefixTree",
    "SequenceInfo",
    "StalePlanError",
    "Stats",
    "TruncateResult",
    "UnknownSequenceError",
    "__version__",
]
