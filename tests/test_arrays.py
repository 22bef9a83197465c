import ml_dtypes
import numpy as np
import pytest
import torch

from chunkcache import InvalidConfigError, _arrays
from chunkcache._arrays import Expected, View

ANY = Expected(("rows", "heads", "head_dim"), (None, 2, 8), ("float32", "float16", "bfloat16"))


def test_a_numpy_array_is_described_where_it_lies() -> None:
    array = np.zeros((3, 2, 8), dtype=np.float32)
    assert _arrays.view("q", array, ANY) == View(
        array.ctypes.data, "float32", (3, 2, 8), (16, 8, 1)
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_torch_tensor_is_described_where_it_lies(dtype: str) -> None:
    tensor = torch.zeros((3, 2, 8), dtype=getattr(torch, dtype))
    assert _arrays.view("q", tensor, ANY) == View(tensor.data_ptr(), dtype, (3, 2, 8), (16, 8, 1))


def test_numpy_takes_bfloat16_from_ml_dtypes() -> None:
    array = np.zeros((1, 2, 8), dtype=ml_dtypes.bfloat16)
    assert _arrays.view("q", array, ANY).dtype == "bfloat16"


def test_outer_strides_are_kept() -> None:
    fused = np.zeros((3, 6, 8), dtype=np.float32)
    assert _arrays.view("q", fused[::2, 2:4], ANY).strides == (96, 8, 1)


def test_strides_of_dimensions_of_one_index_do_not_count() -> None:
    array = np.zeros((1, 2, 8), dtype=np.float32)[::-1]
    assert _arrays.view("q", array, ANY).strides == (0, 8, 1)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((3, 2, 8)), ("float64", "float32 or float16 or bfloat16")),
        (np.zeros((3, 4, 8), dtype=np.float32), ("[3, 4, 8]", "[rows, 2, 8]")),
        (np.zeros((2, 8), dtype=np.float32), ("[2, 8]", "[rows, 2, 8]")),
        (np.zeros((3, 8, 2), dtype=np.float32).swapaxes(1, 2), ("strides", "contiguous")),
        (np.zeros((3, 2, 8), dtype=np.float32)[::-1], ("strides", "negative")),
        (np.zeros((3, 2, 8), dtype=">f4"), ("byte-swapped", "float32")),
        (np.broadcast_to(np.float32(0), (3, 2, 8)), ("strides", "contiguous")),
        (
            np.zeros(3 * 2 * 8 * 4 + 1, dtype=np.int8)[1:].view("f4").reshape(3, 2, 8),
            ("unaligned",),
        ),
        ([[[0.0] * 8] * 2], ("list", "numpy array or a torch tensor")),
        (torch.zeros((3, 2, 8), device="meta"), ("meta", "on cpu")),
        (torch.zeros((3, 2, 8), dtype=torch.float64), ("float64", "float32")),
        (torch.zeros((3, 2, 8)).to_sparse(), ("sparse", "on cpu")),
    ],
)
def test_a_refusal_names_the_argument_the_given_and_the_allowed(array, words) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        _arrays.view("query", array, ANY)
    message = str(caught.value)
    assert message.startswith("query: got ")
    assert "allowed is" in message
    assert all(word in message for word in words), message


def test_an_output_must_be_writable() -> None:
    array = np.zeros((3, 2, 8), dtype=np.float32)
    array.flags.writeable = False
    assert _arrays.view("q", array, ANY)
    with pytest.raises(InvalidConfigError, match="out: got a read-only array"):
        _arrays.view("out", array, ANY, writable=True)


def test_elements_of_an_output_must_not_overlap() -> None:
    tensor = torch.zeros(40).as_strided((3, 2, 8), (4, 8, 1))
    assert _arrays.view("q", tensor, ANY)
    with pytest.raises(InvalidConfigError, match=r"out: got strides .* do not overlap"):
        _arrays.view("out", tensor, ANY, writable=True)


def test_interleaved_outputs_are_allowed() -> None:
    tensor = torch.zeros(2, 3, 8).transpose(0, 1)
    assert _arrays.view("out", tensor, ANY, writable=True).strides == (8, 24, 1)


def test_outputs_and_inputs_must_lie_apart() -> None:
    array = np.zeros((4, 2, 8), dtype=np.float32)
    a, b, c = (_arrays.view("x", part, ANY) for part in (array[:2], array[2:], array[1:3]))
    _arrays.check_apart("out", a, "q", b)
    with pytest.raises(InvalidConfigError, match="out: got memory that overlaps q"):
        _arrays.check_apart("out", a, "q", c)


def test_empty_arrays_overlap_nothing() -> None:
    array = np.zeros((4, 2, 8), dtype=np.float32)
    empty, all_of_it = _arrays.view("x", array[2:2], ANY), _arrays.view("x", array, ANY)
    _arrays.check_apart("out", empty, "q", all_of_it)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", torch.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)]
)
def test_dtypes_have_one_name(dtype) -> None:
    assert _arrays.check_dtype("dtype", dtype) == "bfloat16"


@pytest.mark.parametrize(
    "dtype",
    ["fp8", "fp8_e4m3", "float8_e4m3", torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn],
)
def test_fp8_has_several_names(dtype) -> None:
    assert _arrays.check_dtype("dtype", dtype) == "float8_e4m3fn"


@pytest.mark.parametrize("dtype", ["float64", np.int8, torch.float8_e5m2, "fp7", None])
def test_other_dtypes_are_refused(dtype) -> None:
    with pytest.raises(InvalidConfigError, match=r"dtype: got .*, allowed is float32 or"):
        _arrays.check_dtype("dtype", dtype)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((1, 2), dtype=np.float16),
        torch.zeros((1, 2), dtype=torch.bfloat16),
        np.zeros((1, 2), dtype=ml_dtypes.bfloat16),
    ],
)
def test_a_new_array_is_of_the_same_kind(array) -> None:
    new = _arrays.empty_like(array, (3, 4))
    assert type(new) is type(array)
    assert new.dtype == array.dtype
    assert tuple(new.shape) == (3, 4)


def test_integers_come_from_lists_arrays_and_tensors() -> None:
    for values in ([[1, 2]], np.array([[1, 2]], dtype=np.int32), torch.tensor([[1, 2]])):
        found = _arrays.int_array("block_table", values, 2)
        assert found.dtype == np.int64
        assert found.tolist() == [[1, 2]]


@pytest.mark.parametrize("values", [[[1], [2, 3]], [[1.5]], [1, 2], torch.zeros(1, 1), "ab"])
def test_what_is_not_integers_is_refused(values) -> None:
    with pytest.raises(InvalidConfigError, match=r"block_table: got .*, allowed is integers"):
        _arrays.int_array("block_table", values, 2)


def shrunk() -> torch.Tensor:
    tensor = torch.empty(2, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [shrunk(), torch._neg_view(torch.ones(2, 3))],
    ids=["storage freed", "negated lazily"],
)
def test_a_tensor_without_plain_memory_is_refused(tensor) -> None:
    with pytest.raises(InvalidConfigError, match=r"^k: got .*, allowed is"):
        _arrays.view("k", tensor, Expected(("a", "b"), (None, None), ("float32",)))
