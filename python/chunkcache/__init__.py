"""Shared-prefix K/V cache with two-phase attention."""

from chunkcache._core import __version__
from chunkcache.errors import (
    ChunkCacheError,
    InvalidConfigError,
    KernelError,
    OutOfChunksError,
    StalePlanError,
    UnknownSequenceError,
)

__all__ = [
    "ChunkCacheError",
    "InvalidConfigError",
    "KernelError",
    "OutOfChunksError",
    "StalePlanError",
    "UnknownSequenceError",
    "__version__",
]
