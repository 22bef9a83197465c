"""Scales of K and V in fp8, as arguments."""

import numpy as np
import pytest
import torch

from chunkcache import ChunkCache, InvalidConfigError, attention
from chunkcache.kernels.scales import checked


@pytest.mark.parametrize(
    "given",
    [
        0.5,
        np.float32(0.5),
        np.full((2, 3), 0.5, dtype=np.float32),
        np.full((3, 2), 0.5, dtype=np.float32).T,
        torch.full((2, 3), 0.5),
        [[0.5] * 3] * 2,
    ],
)
def test_numbers_and_arrays(given):
    found = checked("k_scale", given, (2, 3))
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    assert np.array_equal(found, np.full((2, 3), 0.5))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("1", "'1'"),
        (True, "True"),
        ([[1, 2], [3]], "list"),
        ([["a"] * 3] * 2, "list"),
        (np.ones((2, 3)), r"float64 \[2, 3\]"),
        (np.ones(3, dtype=np.float32), r"float32 \[3\]"),
        (torch.ones(2, 3).bfloat16(), r"bfloat16 \[2, 3\]"),
    ],
)
def test_another_type_or_shape_is_refused(given, shown):
    message = rf"^k_scale: got {shown}, allowed is a number or float32 \[2, 3\]$"
    with pytest.raises(InvalidConfigError, match=message):
        checked("k_scale", given, (2, 3))


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), 10**400])
def test_another_value_is_refused(wrong):
    with pytest.raises(InvalidConfigError, match=r"v_scale: got a scale of .*allowed are finite"):
        checked("v_scale", wrong, (2,))


@pytest.mark.parametrize("dtype", ["fp8", "float8_e4m3", torch.float8_e4m3fn])
def test_fp8_on_the_cpu_is_refused(dtype):
    message = "^dtype: got float8_e4m3fn, allowed on the CPU is float32 or float16 or bfloat16$"
    with pytest.raises(InvalidConfigError, match=message):
        ChunkCache(1, 1, 64, dtype=dtype, capacity=1)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_on_the_cpu_are_refused(name):
    with pytest.raises(InvalidConfigError, match=rf"{name}: got 2\.0, allowed on the CPU is None"):
        ChunkCache(1, 1, 64, capacity=1, **{name: 2.0})
    k = np.zeros((1, 16, 1, 64), dtype=np.float32)
    plan = attention.plan_from_block_tables(np.array([[0]]), np.array([3]), 16)
    with pytest.raises(InvalidConfigError, match=rf"{name}: got 2\.0 for K and V of float32"):
        attention.run(plan, k[0, :1], k, k, **{name: 2.0})
