"""How many chunks the pool of an engine gets."""

from __future__ import annotations

import os
from pathlib import Path

from chunkcache.engine.config import EngineConfig, ModelSpec
from chunkcache.errors import InvalidConfigError

_SHARE_OF_AVAILABLE = 0.5


def pool_capacity(config: EngineConfig, spec: ModelSpec, chunk_bytes: int) -> int:
    """Return the pool's capacity in chunks.

    Host memory is taken as it is needed, so the default is generous: what the engine's limits
    could use, within half of the memory available now.

    Raises:
        InvalidConfigError: ``capacity_bytes`` is less than one chunk.
    """
    if config.capacity is not None:
        return config.capacity
    if config.capacity_bytes is not None:
        if config.capacity_bytes < chunk_bytes:
            raise InvalidConfigError(
                f"capacity_bytes is {config.capacity_bytes}; allowed is at least one chunk "
                f"({chunk_bytes} bytes)"
            )
        return config.capacity_bytes // chunk_bytes
    affordable = int(_available_bytes() * _SHARE_OF_AVAILABLE) // chunk_bytes
    model_len = config.max_model_len or spec.max_model_len
    if model_len is None:
        return max(1, affordable)
    useful = config.max_num_seqs * -(-model_len // config.chunk_size)
    return max(1, min(affordable, useful))


def _available_bytes() -> int:
    """Return the memory that can be taken without swapping, as the system estimates it."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
