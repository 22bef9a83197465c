"""Arrays in CUDA memory as torch tensors, checked; other libraries' without a copy."""

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from chunkcache._arrays import FP8
from chunkcache.errors import InvalidConfigError

if TYPE_CHECKING:
    import torch

#: Element types as the kernels name them.
ELEMENTS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
#: Those of pages.
KV_ELEMENTS = {"float16": "F16", "bfloat16": "BF16", FP8: "E4M3"}


#: DLPack's numbers of CUDA memory: plain and managed.
_DLPACK_CUDA = (2, 13)


def is_cuda(array: Any) -> bool:
    """Return whether this is memory of a CUDA device.

    That is a torch tensor on one, or any array with DLPack's methods or a
    `__cuda_array_interface__` (CuPy, Numba, JAX, ...).
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return bool(array.is_cuda)
    if hasattr(array, "__dlpack_device__"):
        return array.__dlpack_device__()[0] in _DLPACK_CUDA
    return hasattr(array, "__cuda_array_interface__")


def as_tensor(name: str, array: Any) -> "torch.Tensor":
    """Return CUDA memory as a torch tensor over the same bytes, ordered after its producer's work.

    A `__cuda_array_interface__` names no device: its memory has to be on torch's current one.

    Args:
        name: the argument's name, for messages.
        array: what `is_cuda` is true of.

    Raises:
        InvalidConfigError: torch is missing, or cannot take the array as it is.
    """
    try:
        import torch
        import torch.utils.dlpack
    except ImportError as missing:
        raise InvalidConfigError(
            f"{name}: got CUDA memory, which needs torch: pip install 'chunkcache[torch]'"
        ) from missing
    if isinstance(array, torch.Tensor):
        return array
    try:
        if hasattr(array, "__dlpack__"):
            # Asks the producer to let torch's current stream wait for what it has queued.
            with torch.cuda.device(array.__dlpack_device__()[1]):
                return torch.utils.dlpack.from_dlpack(array)
        interface = array.__cuda_array_interface__
        tensor = torch.as_tensor(array, device="cuda")
        if tensor.numel() and tensor.data_ptr() != interface["data"][0]:
            raise TypeError("its memory cannot be used in place")
    except (BufferError, RuntimeError, TypeError, ValueError) as problem:
        raise InvalidConfigError(
            f"{name}: got {type(array).__name__} ({problem}), allowed is CUDA memory that torch can"
            " use in place"
        ) from problem
    producer = interface.get("stream")
    if producer is not None:
        # The interface's 1 and 2 are the legacy and the per-thread default stream, as CUDA's own.
        make_stream: Any = torch.cuda.ExternalStream
        waited = make_stream(producer, device=tensor.device)
        torch.cuda.current_stream(tensor.device).wait_stream(waited)
    return tensor


class Wanted(NamedTuple):
    """What an argument may be.

    Attributes:
        dims: names of the dimensions.
        sizes: their sizes, None where free.
        dtypes: names of the allowed dtypes.
        device: CUDA ordinal.
    """

    dims: tuple[str, ...]
    sizes: tuple[int | None, ...]
    dtypes: tuple[str, ...]
    device: int

    def __str__(self) -> str:
        """Return what is allowed, for messages."""
        sizes = (d if s is None else str(s) for d, s in zip(self.dims, self.sizes, strict=True))
        return f"{' or '.join(self.dtypes)} [{', '.join(sizes)}] on cuda:{self.device}"


def dtype_name(tensor: "torch.Tensor") -> str:
    """Return the name of a tensor's dtype: "float16"."""
    return str(tensor.dtype).removeprefix("torch.")


def check(name: str, tensor: Any, wanted: Wanted, *, contiguous: bool = False) -> "torch.Tensor":
    """Check an array in CUDA memory and return it as a tensor.

    Args:
        name: the argument's name, for messages.
        tensor: the argument.
        wanted: what it may be.
        contiguous: whether it must be contiguous in all dimensions, not only the innermost.

    Raises:
        InvalidConfigError: anything else than `wanted`.
    """
    if not is_cuda(tensor):
        kind = getattr(tensor, "device", None) or type(tensor).__name__
        raise InvalidConfigError(f"{name}: got {kind}, allowed is {wanted}")
    found = as_tensor(name, tensor)
    fits = found.dim() == len(wanted.sizes) and all(
        size in (None, n) for n, size in zip(found.shape, wanted.sizes, strict=True)
    )
    if not fits or dtype_name(found) not in wanted.dtypes or found.device.index != wanted.device:
        raise InvalidConfigError(
            f"{name}: got {dtype_name(found)} {list(found.shape)} on {found.device},"
            f" allowed is {wanted}"
        )
    strides = found.stride()
    if contiguous and not found.is_contiguous():
        raise InvalidConfigError(
            f"{name}: got strides {strides} in elements, allowed is a contiguous tensor"
        )
    if found.numel() and strides[-1] != 1:
        raise InvalidConfigError(
            f"{name}: got strides {strides} in elements, allowed is a contiguous innermost"
            " dimension"
        )
    return found


def check_aligned(name: str, tensor: "torch.Tensor", num_bytes: int) -> None:
    """Refuse an address or a stride that is no multiple of so many bytes.

    Raises:
        InvalidConfigError: the address or a stride does not fit.
    """
    size = tensor.element_size()
    outer = list(zip(tensor.stride(), tensor.shape, strict=True))[:-1]
    steps = [stride * size for stride, n in outer if n > 1]
    if tensor.data_ptr() % num_bytes or any(step % num_bytes for step in steps):
        raise InvalidConfigError(
            f"{name}: got address {tensor.data_ptr():#x} and strides {steps} in bytes, allowed is"
            f" multiples of {num_bytes}"
        )


def stream_of(device: int) -> int:
    """Return the handle of torch's current stream on a device."""
    return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
