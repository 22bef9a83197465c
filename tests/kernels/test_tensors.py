"""Arrays of other libraries in CUDA memory."""

import pytest
import torch

from chunkcache import InvalidConfigError, attention
from chunkcache.kernels import tensors
from chunkcache_testing.kernels.device import NEEDS_CUDA


class Dlpack:
    """An array that speaks DLPack alone."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class CudaArray:
    """An array that has a `__cuda_array_interface__` alone."""

    def __init__(self, tensor, stream=None):
        self.tensor = tensor
        self.stream = stream

    @property
    def __cuda_array_interface__(self):
        return {**self.tensor.__cuda_array_interface__, "version": 3, "stream": self.stream}


class Elsewhere:
    """An array whose DLPack methods name no CUDA device."""

    def __dlpack_device__(self):
        return (1, 0)


class Broken:
    """An array that cannot be taken."""

    @property
    def __cuda_array_interface__(self):
        return {"shape": (1,), "typestr": "<V3", "data": (0, False), "version": 3}


def test_memory_of_the_host_is_not_cuda():
    assert not tensors.is_cuda(torch.zeros(1))
    assert not tensors.is_cuda(Elsewhere())
    assert not tensors.is_cuda([1.0])


def test_an_array_that_torch_cannot_take_is_named():
    assert tensors.is_cuda(Broken())
    with pytest.raises(InvalidConfigError, match="q: got Broken"):
        tensors.as_tensor("q", Broken())


@NEEDS_CUDA
@pytest.mark.parametrize("kind", [Dlpack, CudaArray])
def test_arrays_are_taken_in_place(kind):
    tensor = torch.arange(12, dtype=torch.float16, device="cuda").reshape(3, 4)
    taken = tensors.as_tensor("q", kind(tensor))
    assert taken.data_ptr() == tensor.data_ptr()
    assert taken.stride() == tensor.stride()


@NEEDS_CUDA
@pytest.mark.parametrize("kind", [Dlpack, CudaArray])
def test_attention_over_arrays_of_another_library(kind):
    k, v = (torch.randn(4, 16, 2, 64, dtype=torch.float16, device="cuda") for _ in range(2))
    q, out = (torch.randn(2, 4, 64, dtype=torch.float16, device="cuda") for _ in range(2))
    plan = attention.plan_from_block_tables([[0, 1], [0, 2]], [20, 29], 16)
    expected = attention.run(plan, q, k, v)
    given = kind(out)
    assert attention.run(plan, kind(q), kind(k), kind(v), out=given) is given
    assert torch.equal(out, expected)


@NEEDS_CUDA
def test_the_stream_of_an_array_is_waited_for():
    side = torch.cuda.Stream()
    tensor = torch.zeros(1 << 24, device="cuda")
    with torch.cuda.stream(side):
        for _ in range(50):
            tensor += 1
    taken = tensors.as_tensor("q", CudaArray(tensor, side.cuda_stream))
    assert float(taken.min()) == 50
