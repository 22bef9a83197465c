"""Where a model and its cache are: the choice of a device, and arrays on their way to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from chunkcache.errors import InvalidConfigError

#: What K and V may be on a CUDA device.
HALVES = ("float16", "bfloat16")


def resolve_device(device: Any) -> torch.device:
    """Return the device that ``device`` names: "cpu", "cuda", "cuda:1", or a torch.device.

    Raises:
        InvalidConfigError: another kind of device, or a CUDA device that is not there.
    """
    allowed = "'cpu', 'cuda' or 'cuda:N'"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidConfigError(f"device is {device!r}; allowed is {allowed}") from error
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise InvalidConfigError(f"device is {device!r}; allowed is {allowed}")
    if not torch.cuda.is_available():
        raise InvalidConfigError(f"device is {device!r}, but torch finds no CUDA device")
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise InvalidConfigError(
            f"device is {device!r}; allowed is up to cuda:{torch.cuda.device_count() - 1}"
        )
    return torch.device("cuda", index)


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that a model is loaded in when none is asked for."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device, without waiting for what the device is doing."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    # A copy from pageable memory would wait for all work before it.
    return tensor.pin_memory().to(device, non_blocking=True)
