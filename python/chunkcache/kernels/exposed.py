"""Device memory of ours as torch tensors, without a copy."""

import sys
from typing import TYPE_CHECKING, Any

from chunkcache.kernels.tpp import DeviceWords

if TYPE_CHECKING:
    import torch


class _Exposed:
    """Memory as `__cuda_array_interface__` has it; keeps it alive."""

    def __init__(
        self, memory: DeviceWords, address: int, shape: tuple[int, ...], code: str
    ) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": code,
            "data": (address, False),
            "version": 3,
        }


def int64_words(memory: DeviceWords, begin: int, count: int, device: int) -> "torch.Tensor":
    """Return int64 numbers `[begin, begin + count)` of some memory as a tensor."""
    return _tensor(memory, memory.address + 8 * begin, (count,), "<i8", device)


def elements(
    memory: DeviceWords, address: int, shape: tuple[int, ...], dtype: "torch.dtype", device: int
) -> "torch.Tensor":
    """Return what lies at an address in some memory as a contiguous tensor of 8 or 16-bit items."""
    code = {1: "|u1", 2: "<i2"}[dtype.itemsize]
    return _tensor(memory, address, shape, code, device).view(dtype)


def _tensor(
    memory: DeviceWords, address: int, shape: tuple[int, ...], code: str, device: int
) -> "torch.Tensor":
    library: Any = sys.modules["torch"]
    exposed = _Exposed(memory, address, shape, code)
    tensor: torch.Tensor = library.as_tensor(exposed, device=f"cuda:{device}")
    return tensor
