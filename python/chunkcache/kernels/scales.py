"""The scales of K and V in fp8: an element stands for what is stored times its head's scale."""

import math
import numbers
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from chunkcache._arrays import FP8, described
from chunkcache.errors import InvalidConfigError
from chunkcache.kernels import tensors
from chunkcache.kernels.tensors import Wanted

if TYPE_CHECKING:
    import torch


def check_unused(dtype: str, **scales: Any) -> None:
    """Refuse scales, by their names, of K and V that have none.

    Raises:
        InvalidConfigError: a scale is given, and the dtype is not fp8.
    """
    for name, given in scales.items():
        if given is not None and dtype != FP8:
            raise InvalidConfigError(
                f"{name}: got {_shown(given)} for K and V of {dtype}, allowed is None: {FP8} alone"
                " has scales"
            )


def layer_scales(
    name: str, given: Any, num_layers: int, num_kv_heads: int, device: int
) -> "torch.Tensor":
    """Return a cache's scales, float32 `[num_layers, num_kv_heads]`, in memory of their own.

    Args:
        name: the argument's name, for messages.
        given: None for 1, a number for all heads, or the scales themselves.
        num_layers: layers of the cache.
        num_kv_heads: K/V heads of a layer.
        device: CUDA ordinal.

    Raises:
        InvalidConfigError: of another dtype or shape, or not all finite and above 0.
    """
    shape = (num_layers, num_kv_heads)
    return _on_device(checked(name, 1.0 if given is None else given, shape), device)


def head_scales(name: str, given: Any, num_kv_heads: int, device: int) -> "torch.Tensor | None":
    """Return the scales of one layer's pages, float32 `[num_kv_heads]`, or None for 1.

    Args:
        name: the argument's name, for messages.
        given: None, a number for all heads, or the scales themselves. A tensor on the device is
            used in place, and its values are not looked at.
        num_kv_heads: K/V heads of the pages.
        device: CUDA ordinal.

    Raises:
        InvalidConfigError: of another dtype or shape, or, on the CPU, not all finite and above 0.
    """
    if given is None:
        return None
    if tensors.is_cuda(given):
        wanted = Wanted(("num_kv_heads",), (num_kv_heads,), ("float32",), device)
        return tensors.check(name, given, wanted, contiguous=True)
    return _on_device(checked(name, given, (num_kv_heads,)), device)


def checked(name: str, given: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return scales in host memory as a contiguous float32 array.

    Args:
        name: the argument's name, for messages.
        given: a number for all heads, or an array, a tensor or sequences of that shape.
        shape: of the result.

    Raises:
        InvalidConfigError: of another dtype or shape, or not all finite and above 0.
    """
    found = _in_host_memory(given)
    if found is not None and _is_number(given):
        found = np.full(shape, found)
    if found is None or found.shape != shape:
        raise _refused(name, given, shape)
    _check_values(name, found)
    return np.ascontiguousarray(found)


def check_given(name: str, given: Any, dims: tuple[str, ...]) -> None:
    """Refuse what can be no scales of K and V whose sizes are not known yet.

    Args:
        name: the argument's name, for messages.
        given: a number for all heads, or an array, a tensor or sequences.
        dims: names of the dimensions that it may have.

    Raises:
        InvalidConfigError: of another dtype or number of dimensions, or not all finite and above 0.
    """
    found = _in_host_memory(given)
    if found is None or (found.ndim != len(dims) and not _is_number(given)):
        raise _refused(name, given, dims)
    _check_values(name, found)


def _in_host_memory(given: Any) -> np.ndarray[Any, Any] | None:
    """Return a number, an array, a tensor or sequences as float32; None for anything else."""
    torch = sys.modules.get("torch")
    found = given
    if torch is not None and isinstance(given, torch.Tensor):
        found = given.detach().cpu()
        found = found.numpy() if found.dtype == torch.float32 else None
    elif _is_number(given):
        found = np.array(_as_float(given))
    elif isinstance(given, Sequence) and not isinstance(given, str):
        found = _as_array(given)
    return found if isinstance(found, np.ndarray) and found.dtype == np.float32 else None


def _check_values(name: str, scales: np.ndarray[Any, Any]) -> None:
    allowed = np.isfinite(scales) & (scales > 0)
    if not allowed.all():
        wrong = scales[~allowed][0]
        raise InvalidConfigError(f"{name}: got a scale of {wrong}, allowed are finite ones above 0")


def _refused(name: str, given: Any, shape: tuple[Any, ...]) -> InvalidConfigError:
    sizes = ", ".join(map(str, shape))
    return InvalidConfigError(
        f"{name}: got {_shown(given)}, allowed is a number or float32 [{sizes}]"
    )


def _is_number(given: Any) -> bool:
    return isinstance(given, numbers.Real) and not isinstance(given, (bool, np.bool_))


def _as_float(given: Any) -> np.float32:
    try:
        with np.errstate(over="ignore"):
            return np.float32(float(given))
    except OverflowError:
        return np.float32(math.inf)


def _as_array(given: Sequence[Any]) -> np.ndarray[Any, Any] | None:
    """Return nested sequences of numbers as float32, or None if they are anything else."""
    try:
        found = np.array(given)
    except ValueError:
        return None
    with np.errstate(over="ignore"):
        return found.astype(np.float32) if found.dtype.kind in "fiu" else None


def _shown(given: Any) -> str:
    """Return a scale as messages show it: arrays by dtype and shape."""
    if hasattr(given, "shape") and hasattr(given, "dtype"):
        return f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
    return described(given)


def _on_device(found: np.ndarray[Any, Any], device: int) -> "torch.Tensor":
    library: Any = sys.modules["torch"]
    tensor: torch.Tensor = library.tensor(found, device=f"cuda:{device}")
    return tensor
