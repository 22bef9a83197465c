"""Numpy arrays and torch CPU tensors as addresses, the one way data reaches the compiled half.

Nothing is copied: an array is checked and described by a `View`, and its memory is read or written
in place. torch is never imported here: a tensor can only come from a caller who has imported it.
"""

import contextlib
import operator
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from chunkcache.errors import InvalidConfigError

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = npt.NDArray[Any] | torch.Tensor
else:
    Tensor = Any

T = TypeVar("T", bound=Tensor)

#: Element types of K, V, queries and outputs, and their sizes in bytes.
ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}

#: K and V of 8 bits, on a CUDA device alone: four of exponent, three of mantissa, no infinities; as
#: torch and numpy (ml_dtypes) name it. What else it may be called: as other engines have it.
FP8 = "float8_e4m3fn"
_FP8_NAMES = (FP8, "float8_e4m3", "fp8_e4m3", "fp8")

#: Characters of a value that a message shows; of a longer one it gives the type.
_MAX_SHOWN = 40

# numpy and torch build the name of a dtype anew at each call, which costs more than all checks.
_dtype_names: dict[Any, str] = {}


class View(NamedTuple):
    """Where an array lies: what the compiled half is given in its place."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    #: Elements from one index to the next, per dimension; 0 where there is no next.
    strides: tuple[int, ...]


class Expected(NamedTuple):
    """What an argument may be; sizes that are None are free, named in messages by `dims`."""

    dims: tuple[str, ...]
    sizes: tuple[int | None, ...]
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        """Return the allowed dtypes and shape as a message shows them."""
        sizes = (d if s is None else str(s) for d, s in zip(self.dims, self.sizes, strict=True))
        return f"{' or '.join(self.dtypes)} [{', '.join(sizes)}] on cpu"


def view(
    name: str,
    array: Tensor,
    expected: Expected,
    *,
    writable: bool = False,
    contiguous: bool = False,
) -> View:
    """Check an array and describe where it lies.

    Args:
        name: the argument's name, for messages.
        array: a numpy array or a torch CPU tensor; its innermost dimension must be contiguous.
        expected: the allowed dtypes and shape.
        writable: whether the array is to be written.
        contiguous: whether it must be contiguous in all dimensions.

    Raises:
        InvalidConfigError: anything else than `expected`, an array that cannot be read (or written)
            in place.
    """
    if _is_torch(array):
        found = _torch_view(name, array, expected)
    elif isinstance(array, np.ndarray):
        found = _numpy_view(name, array, expected)
        if writable and not array.flags.writeable:
            raise InvalidConfigError(f"{name}: got a read-only array, allowed is a writable one")
    else:
        raise InvalidConfigError(
            f"{name}: got {described(array)}, allowed is a numpy array or a torch tensor,"
            f" {expected}"
        )
    if found.dtype not in expected.dtypes or not _fits(found.shape, expected.sizes):
        raise _refused(name, found.dtype, found.shape, "cpu", expected)
    return _checked_strides(name, found, writable, contiguous)


def empty_like(
    array: Tensor, shape: tuple[int, ...], dtype: str | None = None, *, fill: float | None = None
) -> Any:
    """Return a new array of the same kind as `array`, numpy or torch.

    Args:
        array: the array whose kind, and whose dtype by default, the new one has.
        shape: the new shape.
        dtype: the name of another dtype, such as "float32".
        fill: the value of every element; left unset by default.
    """
    if _is_torch(array):
        torch = sys.modules["torch"]
        new = torch.empty(shape, dtype=array.dtype if dtype is None else getattr(torch, dtype))
        return new if fill is None else new.fill_(fill)
    new = np.empty(shape, dtype=array.dtype if dtype is None else dtype)
    if fill is not None:
        new.fill(fill)
    return new


def check_apart(out_name: str, out: View, name: str, other: View) -> None:
    """Refuse an output whose memory begins before another array ends, and the reverse."""
    (a, b), (c, d) = _extent(out), _extent(other)
    if a < d and c < b:
        raise InvalidConfigError(
            f"{out_name}: got memory that overlaps {name}, allowed is memory of its own"
        )


def dtype_name(dtype: Any) -> str:
    """Return the name of a numpy or torch dtype, or of what numpy takes for one: "float32"."""
    name = described(dtype) if dtype is None or isinstance(dtype, int) else str(dtype)
    if name.startswith("torch."):
        return name.removeprefix("torch.")
    if name in ITEM_SIZES:
        return name
    # numpy takes None for float64, and dicts and lists for structures.
    if not isinstance(dtype, (str, type, np.dtype)):
        return described(dtype)
    try:
        return str(np.dtype(dtype).name)
    except (TypeError, ValueError, SyntaxError):
        return described(dtype)


def is_fp8(dtype: Any) -> bool:
    """Return whether that is fp8 (e4m3) by one of its names, or as torch and numpy have it."""
    return dtype in _FP8_NAMES if isinstance(dtype, str) else dtype_name(dtype) == FP8


def check_dtype(name: str, dtype: Any) -> str:
    """Return the name of an element type that K and V may have, on some device, or refuse it."""
    if is_fp8(dtype):
        return FP8
    found = dtype_name(dtype)
    if found not in ITEM_SIZES:
        allowed = " or ".join(ITEM_SIZES)
        raise InvalidConfigError(
            f"{name}: got {found}, allowed is {allowed} or, on a CUDA device, {FP8}"
        )
    return found


def described(value: Any) -> str:
    """Return a value as messages show it: numbers, short texts and None as they are, or its type.

    A type stands for itself, a dtype for its name.
    """
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, np.dtype):
        return value.name
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, (bool, int, float, str, np.integer, np.floating)):
        # An int may be too long to be written out.
        try:
            text = repr(value.item() if isinstance(value, np.generic) else value)
        except ValueError:
            return type(value).__name__
        if len(text) <= _MAX_SHOWN:
            return text
    return type(value).__name__


def index(name: str, value: Any, low: int, high: int) -> int:
    """Return an integer from `low` to `high` as a plain int."""
    found = None
    if not isinstance(value, (bool, np.bool_)):
        # Arrays have the method, too, and refuse it unless they are one integer.
        with contextlib.suppress(TypeError, AttributeError):
            found = operator.index(value)
    if found is None or not low <= found <= high:
        raise InvalidConfigError(
            f"{name}: got {described(value)}, allowed is an integer from {low} to {high}"
        )
    return found


def flag(name: str, value: Any) -> bool:
    """Return True or False as a plain bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidConfigError(f"{name}: got {described(value)}, allowed is True or False")
    return bool(value)


def int_array(
    name: str, values: Any, ndim: int, high: int = 2**32 - 1, *, keep_int32: bool = False
) -> npt.NDArray[Any]:
    """Return a numpy array, a torch tensor or nested sequences of integers as int64, contiguous.

    Args:
        name: the argument's name, for messages.
        values: the integers.
        ndim: their number of dimensions.
        high: the largest integer that is allowed, for messages; what 64 bits hold is not refused.
        keep_int32: whether int32 stays int32.

    Raises:
        InvalidConfigError: not integers, another number of dimensions, or a tensor that is not on
            the CPU.
    """
    allowed = f"integers of {ndim} dimensions"
    if _is_torch(values):
        _check_torch_device(name, values, f"{allowed} on cpu")
        if values.is_floating_point() or values.is_complex():
            found = dtype_name(values.dtype)
            raise InvalidConfigError(f"{name}: got {found}, allowed is {allowed}")
        values = values.detach().numpy()
    elif isinstance(values, (str, bytes, bytearray, AbstractSet, Mapping)):
        raise InvalidConfigError(f"{name}: got {described(values)}, allowed is {allowed}")
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidConfigError(f"{name}: got ragged rows, allowed is {allowed}") from error
    if array.shape == (0,) and isinstance(values, Sequence):
        # An empty list has as many dimensions as its rows would have.
        array = array.reshape((0,) * ndim)
    if array.ndim != ndim:
        given = described(values) if array.ndim == 0 else f"{array.ndim} dimensions"
        raise InvalidConfigError(f"{name}: got {given}, allowed is {allowed}")
    if array.size == 0:
        return np.zeros(array.shape, np.int64)
    if array.dtype.kind == "O" or array.dtype == np.uint64:
        _check_entries(name, array, high)
    elif not np.issubdtype(array.dtype, np.integer):
        raise InvalidConfigError(f"{name}: got {array.dtype}, allowed is {allowed}")
    keeps = keep_int32 and array.dtype == np.int32
    return np.ascontiguousarray(array, dtype=np.int32 if keeps else np.int64)


def _check_entries(name: str, array: npt.NDArray[Any], high: int) -> None:
    """Refuse the first entry of an array that is no integer of 64 bits with a sign."""
    if array.dtype.kind != "O" and array.max() < 2**63:
        return
    for at, value in np.ndenumerate(array):
        is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not is_integer or not -(2**63) <= value < 2**63:
            place = ", ".join(map(str, at))
            raise InvalidConfigError(
                f"{name}[{place}]: got {described(value)}, allowed is an integer from 0 to {high}"
            )


def is_dense(value: Any) -> "TypeGuard[Tensor]":
    """Return whether this is a numpy array or a dense torch tensor, on any device."""
    if _is_torch(value):
        return value.layout is sys.modules["torch"].strided
    return isinstance(value, np.ndarray)


def _fits(shape: tuple[int, ...], sizes: tuple[int | None, ...]) -> bool:
    if shape == sizes:
        return True
    return len(shape) == len(sizes) and all(
        size in (None, n) for n, size in zip(shape, sizes, strict=True)
    )


def _is_torch(array: Any) -> "TypeGuard[torch.Tensor]":
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _check_torch_device(name: str, tensor: "torch.Tensor", allowed: str) -> None:
    if tensor.device.type != "cpu" or tensor.layout is not sys.modules["torch"].strided:
        raise InvalidConfigError(
            f"{name}: got a {tensor.layout} tensor on {tensor.device}, allowed is {allowed}"
        )


def _torch_view(name: str, tensor: "torch.Tensor", expected: Expected) -> View:
    _check_torch_device(name, tensor, str(expected))
    if tensor.is_neg():
        raise InvalidConfigError(
            f"{name}: got a tensor that is negated lazily, allowed is {expected},"
            " so call resolve_neg() first"
        )
    try:
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        address, storage = tensor.data_ptr(), tensor.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
    except RuntimeError as error:
        # Nested, batched and traced tensors have no memory of their own.
        raise InvalidConfigError(
            f"{name}: got a tensor without plain memory ({error}), allowed is {expected}"
        ) from error
    if 0 not in shape and min(strides, default=0) >= 0:
        end = address + (_last(shape, strides) + 1) * tensor.element_size()
        # A storage may have been freed or shrunk below a tensor that still names it.
        if not address or end > begin + size:
            raise InvalidConfigError(
                f"{name}: got a tensor {shape} whose storage holds only {size} bytes,"
                f" allowed is {expected}"
            )
    return View(address, _known_name(tensor.dtype), shape, strides)


def _numpy_view(name: str, array: npt.NDArray[Any], expected: Expected) -> View:
    dtype, flags, shape = array.dtype, array.flags, array.shape
    item = dtype.itemsize
    gapless = flags.c_contiguous and 0 not in shape
    aligned = flags.aligned and dtype.isnative
    if not aligned or (not gapless and any(stride % item for stride in array.strides)):
        raise InvalidConfigError(
            f"{name}: got an array of unaligned or byte-swapped elements, allowed is {expected}"
        )
    address, _read_only = array.__array_interface__["data"]
    strides = _contiguous(shape) if gapless else tuple(stride // item for stride in array.strides)
    return View(address, _known_name(dtype), shape, strides)


def _known_name(dtype: Any) -> str:
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = dtype_name(dtype)
    return name


def _checked_strides(name: str, found: View, writable: bool, contiguous: bool) -> View:
    """Refuse strides that the kernels do not follow, and drop those of dimensions of one index."""
    if 0 in found.shape:
        return found._replace(strides=_contiguous(tuple(max(n, 1) for n in found.shape)))
    if found.strides == _contiguous(found.shape):
        return found
    strides = tuple(s if n > 1 else 0 for n, s in zip(found.shape, found.strides, strict=True))
    if strides[-1] != min(found.shape[-1] - 1, 1) or min(strides) < 0:
        raise InvalidConfigError(
            f"{name}: got strides {found.strides} in elements, allowed is a contiguous innermost"
            " dimension and no negative stride"
        )
    if contiguous and strides != _contiguous(found.shape):
        raise InvalidConfigError(
            f"{name}: got strides {found.strides} in elements, allowed is a contiguous array"
        )
    if writable and not _disjoint(found.shape, strides):
        raise InvalidConfigError(
            f"{name}: got strides {found.strides} in elements, allowed is an array whose elements"
            " do not overlap"
        )
    return found._replace(strides=strides)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of an array without gaps, 0 for dimensions of one index."""
    strides = []
    step = 1
    for n in reversed(shape):
        strides.append(step if n > 1 else 0)
        step *= n
    return tuple(reversed(strides))


def _disjoint(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether each dimension steps over all that the dimensions of smaller strides span."""
    reach = 1
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if n > 1:
            if stride < reach:
                return False
            reach = (n - 1) * stride + reach
    return True


def _extent(found: View) -> tuple[int, int]:
    """Return the first byte of a view and one past its last; empty views have neither."""
    if 0 in found.shape:
        return found.address, found.address
    last = _last(found.shape, found.strides)
    return found.address, found.address + (last + 1) * ITEM_SIZES[found.dtype]


def _last(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the offset of the last element from the first, in elements."""
    last = 0
    for n, stride in zip(shape, strides, strict=True):
        last += (n - 1) * stride
    return last


def _refused(
    name: str, dtype: str, shape: tuple[int, ...], device: str, expected: Expected
) -> InvalidConfigError:
    return InvalidConfigError(
        f"{name}: got {dtype} {list(shape)} on {device}, allowed is {expected}"
    )
