"""How many chunks the pool of an engine gets."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from chunkcache.engine.config import EngineConfig, ModelSpec
from chunkcache.errors import InvalidConfigError

_DEFAULT_FRACTION = 0.5


def pool_capacity(
    config: EngineConfig, spec: ModelSpec, chunk_bytes: int, device: torch.device
) -> int:
    """Return the pool's capacity in chunks.

    Host memory is taken as it is needed, so the default is generous: what the engine's limits
    could use, within half of the memory that is free now.

    Raises:
        InvalidConfigError: ``capacity_bytes`` or ``memory_fraction`` is less than one chunk.
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
    available = _available_bytes(device)
    fraction = config.memory_fraction
    affordable = int(available * (_DEFAULT_FRACTION if fraction is None else fraction))
    affordable //= chunk_bytes
    if fraction is not None:
        if affordable < 1:
            raise InvalidConfigError(
                f"memory_fraction is {fraction}; allowed is at least one chunk ({chunk_bytes} "
                f"bytes) of the {available} bytes that are free"
            )
        return affordable
    model_len = config.max_model_len or spec.max_model_len
    if model_len is None:
        return max(1, affordable)
    useful = config.max_num_seqs * -(-model_len // config.chunk_size)
    return max(1, min(affordable, useful))


def _available_bytes(device: torch.device) -> int:
    """Return the device's free memory; of the host what can be taken without swapping."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
