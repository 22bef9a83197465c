"""Where the tests of a cache run: on the CPU, and on a CUDA device where there is one."""

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

from chunkcache import ChunkCache

NEEDS_CUDA = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cuda") is None,
    reason="needs a CUDA device and chunkcache[cuda]",
)

NEEDS_FP8 = pytest.mark.skipif(
    NEEDS_CUDA.args[0] or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device of compute capability 8.9 or more and chunkcache[cuda]",
)

NEEDS_TWO_DEVICES = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)

DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]


class NumpyCudaCache:
    """A cache on a CUDA device whose arrays come and go as numpy, as those of a CPU cache do.

    Its memory is full of NaN at first, so that what was never written shows where it is read.
    """

    def __init__(self, num_layers: int, *sizes: int, **options: Any) -> None:
        self.cache = ChunkCache(num_layers, *sizes, device="cuda", **options)
        for layer in range(num_layers):
            self.cache.kv_layer(layer).fill_(float("nan"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def write_kv(self, layer: int, k: Any, v: Any, plan: Any) -> None:
        self.cache.write_kv(layer, to_cuda(k), to_cuda(v), plan)

    def read_kv(self, layer: int, seq: int, begin: int, end: int) -> tuple[Any, ...]:
        return tuple(to_numpy(part) for part in self.cache.read_kv(layer, seq, begin, end))

    def attend(self, layer: int, q: Any, plan: Any, **options: Any) -> Any:
        out = torch.full(q.shape, float("nan"), dtype=to_cuda(q).dtype, device="cuda")
        result = self.cache.attend(layer, to_cuda(q), plan, out=out, **options)
        if isinstance(result, tuple):
            return tuple(to_numpy(part) for part in result)
        return to_numpy(result)


def to_cuda(array: Any) -> torch.Tensor:
    """A numpy array on the device; bfloat16 as ml_dtypes has it."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def to_numpy(tensor: torch.Tensor) -> Any:
    """A tensor in host memory, bfloat16 as float32."""
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return tensor.cpu().numpy()
