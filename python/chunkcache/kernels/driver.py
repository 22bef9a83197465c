"""Load compiled kernels and launch them, through the CUDA driver API of cuda-python."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from chunkcache.errors import KernelError
from chunkcache.kernels.build import Instance, compiled


@cache
def driver() -> Any:
    """Return `cuda.bindings.driver`, initialised.

    Raises:
        KernelError: cuda-python or a CUDA driver is missing.
    """
    try:
        from cuda.bindings import driver as bindings
    except ImportError as missing:
        raise KernelError(
            "the CUDA kernels need cuda-python: pip install 'chunkcache[cuda]'"
        ) from missing
    try:
        (error,) = bindings.cuInit(0)
    except RuntimeError as missing:
        raise KernelError(f"no CUDA driver: {missing}") from missing
    if error != bindings.CUresult.CUDA_SUCCESS:
        raise KernelError(f"no CUDA device: {error}")
    return bindings


def check(result: tuple[Any, ...], what: str) -> Any:
    """Return what a driver call gave beside its status.

    Raises:
        KernelError: the status is an error.
    """
    error, *values = result
    if error != driver().CUresult.CUDA_SUCCESS:
        _, text = driver().cuGetErrorString(error)
        detail = text.decode() if isinstance(text, bytes) else str(text)
        raise KernelError(f"{what}: {error.name}: {detail}")
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True)
class DeviceLimits:
    """What launches depend on."""

    num_multiprocessors: int
    shared_bytes: int
    capability: tuple[int, int]


@cache
def limits(device: int) -> DeviceLimits:
    """Read a device's limits."""
    cu = driver()
    attribute = cu.CUdevice_attribute

    def read(name: str) -> int:
        return int(check(cu.cuDeviceGetAttribute(getattr(attribute, name), device), name))

    return DeviceLimits(
        num_multiprocessors=read("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"),
        shared_bytes=read("CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        capability=(
            read("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
            read("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
        ),
    )


@cache
def _primary_context(device: int) -> Any:
    return check(driver().cuDevicePrimaryCtxRetain(device), "primary context")


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make a device's primary context, the one torch uses, current in this thread for a while."""
    cu = driver()
    check(cu.cuCtxPushCurrent(_primary_context(device)), "cuCtxPushCurrent")
    try:
        yield
    finally:
        check(cu.cuCtxPopCurrent(), "cuCtxPopCurrent")


@cache
def load(instance: Instance, device: int, shared_bytes: int) -> Any:
    """Return the function of an instance on a device, allowed that much shared memory."""
    cu = driver()
    with on_device(device):
        module = check(cu.cuModuleLoadData(compiled(instance)), f"load {instance.name}")
        function = check(cu.cuModuleGetFunction(module, instance.name.encode()), instance.name)
        if shared_bytes > 48 * 1024:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(function, attribute, shared_bytes), "shared memory")
    return function


class Launch:
    """A kernel, its grid and the bytes of its single parameter, ready to be launched again."""

    def __init__(
        self,
        function: Any,
        grid: int | tuple[int, int],
        block: int,
        shared_bytes: int,
        params: bytes,
        *,
        overlap: bool = False,
    ) -> None:
        """Keep everything that a launch needs.

        Args:
            function: from `load`.
            grid: blocks, in one or two dimensions.
            block: threads of a block.
            shared_bytes: dynamic shared memory of a block.
            params: the kernel's single parameter, by value.
            overlap: start while the launch before is ending (programmatic dependent launch); the
                kernel itself waits before it reads what others wrote.
        """
        cu = driver()
        self._function = function
        self._params = np.frombuffer(params, dtype=np.uint8).copy()
        self._pointers = np.array([self._params.ctypes.data], dtype=np.uint64)
        config = cu.CUlaunchConfig()
        grid_x, grid_y = grid if isinstance(grid, tuple) else (grid, 1)
        config.gridDimX, config.gridDimY, config.gridDimZ = grid_x, grid_y, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared_bytes
        config.numAttrs = 0
        if overlap:
            attribute = cu.CUlaunchAttribute()
            ids = cu.CUlaunchAttributeID
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        self._config = config

    def run(self, stream: int) -> None:
        """Launch on a stream, given by its handle."""
        cu = driver()
        self._config.hStream = cu.CUstream(stream)
        result = cu.cuLaunchKernelEx(
            self._config, self._function, int(self._pointers.ctypes.data), 0
        )
        check(result, "launch")


@dataclass(frozen=True)
class TensorBox:
    """What a tensor map describes: 5-D pages and the box that one copy takes.

    Attributes:
        sizes: columns, tokens, runs of columns, heads, pages.
        strides: of a token, a run of columns, a head and a page, in bytes.
        box: columns, tokens and runs of columns of one copy.
    """

    sizes: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int]
    box: tuple[int, int, int]


def tensor_map(address: int, element: str, tensor: TensorBox) -> bytes:
    """Describe K or V pages to the copy engine: 128 bytes.

    Args:
        address: page 0, head 0, token 0.
        element: `F16` or `BF16`.
        tensor: sizes, strides and box.
    """
    cu = driver()
    kinds = cu.CUtensorMapDataType
    kind = {
        "F16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "BF16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[element]
    result = check(
        cu.cuTensorMapEncodeTiled(
            kind,
            5,
            address,
            [cu.cuuint64_t(n) for n in tensor.sizes],
            [cu.cuuint64_t(n) for n in tensor.strides],
            [cu.cuuint32_t(n) for n in (*tensor.box, 1, 1)],
            [cu.cuuint32_t(1)] * 5,
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "cuTensorMapEncodeTiled",
    )
    return ctypes.string_at(int(result.getPtr()), 128)
