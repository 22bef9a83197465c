"""The sizes of a cache on a CUDA device: what is refused, and how that is said."""

import pytest

from chunkcache import InvalidConfigError
from chunkcache.kernels.storage import KvShape, check_shape, num_chunks

SHAPE = KvShape(2, 4, 64, "float16", 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers: got 0, allowed is an integer from 1 to 65536"),
        ({"num_kv_heads": True}, "num_kv_heads: got True, allowed is an integer from 1 to 65536"),
        (
            {"dtype": "float32"},
            "dtype: got float32, allowed on a CUDA device is float16 or bfloat16 or float8_e4m3fn",
        ),
        (
            {"head_dim": 72},
            "head_dim: got 72, allowed on a CUDA device is 64 or 80 or 96 or 112 or 128 or 192 or"
            " 256",
        ),
        ({"head_dim": 64.0}, "head_dim: got 64.0, allowed is an integer from 64 to 256"),
        ({"chunk_size": 24}, "chunk_size: got 24, allowed is 16 to 128, a multiple of 16"),
        ({"chunk_size": [16]}, "chunk_size: got list, allowed is an integer from 16 to 128"),
    ],
)
def test_a_shape_is_refused_by_name(change, message) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        check_shape(SHAPE._replace(**change))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, None, None), "capacity: got 0, allowed is an integer from 1 to 4294967294"),
        ((10**6000, None, None), "capacity: got int, allowed is an integer from 1 to 4294967294"),
        (
            (None, 10, None),
            "capacity_bytes: got 10, allowed is an integer from 32768 to 140737488289792",
        ),
        ((None, None, "half"), "memory_fraction: got 'half', allowed is a number in (0, 1]"),
        ((None, None, True), "memory_fraction: got True, allowed is a number in (0, 1]"),
    ],
)
def test_a_size_is_refused_by_name(sizes, message) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        num_chunks(0, SHAPE, *sizes)
    assert str(caught.value) == message


def test_bytes_are_rounded_down_to_chunks() -> None:
    assert num_chunks(0, SHAPE, None, 3 * SHAPE.chunk_bytes + 1, None) == 3
