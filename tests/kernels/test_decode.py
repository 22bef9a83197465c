"""The kernels of a decode step beside the attention, against the same in plain torch operations."""

import importlib.util
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkcache import InvalidConfigError
from chunkcache.kernels.decode import (
    MAX_ROWS,
    DecodeKernels,
    HeadNorms,
    Pages,
    Rotation,
    compiled_rows,
    cut_product,
)

NEEDS_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or importlib.util.find_spec("cuda") is None,
    reason="needs a CUDA device of compute capability 9.0 and chunkcache[cuda]",
)

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)


@given(
    num_tiles=st.integers(1, 300),
    columns=st.integers(1, 20_000),
    num_blocks=st.integers(2, 150),
)
def test_every_unit_is_one_blocks(num_tiles, columns, num_blocks) -> None:
    cut = cut_product(num_tiles, columns, num_blocks)
    assert cut.num_units == num_tiles * cut.tile_units
    begins = [cut.begin_of(block) for block in range(cut.num_blocks + 1)]
    assert (begins[0], begins[-1]) == (0, cut.num_units)
    assert all(begin < end for begin, end in pairwise(begins))
    assert cut.num_blocks <= num_blocks
    for block, (begin, end) in enumerate(pairwise(begins)):
        assert cut.block_of(begin) == cut.block_of(end - 1) == block
    for first in range(0, cut.num_units, cut.tile_units):
        last = first + cut.tile_units - 1
        assert 1 <= cut.block_of(last) - cut.block_of(first) + 1 <= cut.max_parts


@pytest.mark.parametrize("rows", [0, -1, MAX_ROWS + 1])
def test_numbers_of_rows_without_a_product_are_refused(rows) -> None:
    with pytest.raises(InvalidConfigError, match=f"rows: got {rows}, allowed is 1 to {MAX_ROWS}"):
        compiled_rows(rows)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, device="cuda", generator=generator)


def weights(*shapes: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return matrices that keep the size of what they multiply."""
    return [
        normal(*shape, dtype=dtype, seed=seed) / shape[1] ** 0.5
        for seed, shape in enumerate(shapes, 1)
    ]


def kernels_for(matrices: list[torch.Tensor], rows: int) -> DecodeKernels:
    """Return launches whose parts are NaN where nothing was written."""
    size = DecodeKernels.num_part_values(matrices, rows, 0)
    return DecodeKernels(rows, torch.full((size,), float("nan"), device="cuda"))


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    result = torch.zeros(rows, *x.shape[1:], dtype=x.dtype, device=x.device)
    result[: len(x)] = x
    return result


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert float(error) <= TOLERANCE[found.dtype]


@NEEDS_HOPPER
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 13, 32, 50, 64, 96])
@pytest.mark.parametrize(
    ("width", "columns"), [(4096, 4096), (512, 72), (200, 1000), (4096, 11008), (128, 64)]
)
def test_a_product_is_added_and_normalised(dtype, rows, width, columns) -> None:
    (matrix,) = weights((width, columns), dtype=dtype)
    kernels = kernels_for([matrix], rows)
    x = normal(rows, columns, dtype=dtype, seed=7)
    before = normal(rows, width, dtype=dtype, seed=8)
    hidden, out = padded(before, kernels.padded_rows), torch.empty_like(before)
    norm = normal(width, dtype=dtype, seed=9)
    parts = kernels.product([matrix], padded(x, kernels.padded_rows))
    kernels.add_and_normalize(parts, hidden, norm, 1e-5, out)
    check(hidden[:rows], before.float() + x.float() @ matrix.float().T)
    expected = torch.nn.functional.rms_norm(hidden[:rows].float(), (width,), norm.float(), 1e-5)
    check(out, expected)


@NEEDS_HOPPER
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 32, 96])
@pytest.mark.parametrize(("inner", "columns"), [(11008, 512), (1000, 896)])
def test_a_gate(dtype, rows, inner, columns) -> None:
    gate, up = weights((inner, columns), (inner, columns), dtype=dtype)
    kernels = kernels_for([gate, up], rows)
    x = normal(rows, columns, dtype=dtype)
    out = torch.empty(rows, inner, dtype=dtype, device="cuda")
    kernels.gate(kernels.product([gate, up], padded(x, kernels.padded_rows)), out)
    g, u = x.float() @ gate.float().T, x.float() @ up.float().T
    check(out, torch.nn.functional.silu(g) * u)


@NEEDS_HOPPER
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_come_from_picks_or_as_they_are(dtype) -> None:
    embedding, norm = normal(50, 256, dtype=dtype), normal(256, dtype=dtype)
    picked = torch.tensor([7, -1, 9], device="cuda")
    sources = torch.tensor([2, -1 - 30, 1, 0, -1 - 0], device="cuda")
    hidden = torch.empty(5, 256, dtype=dtype, device="cuda")
    out = torch.empty_like(hidden)
    kernels = DecodeKernels(5, torch.empty(1, device="cuda"))
    kernels.embed(sources, picked, embedding, hidden, norm, 1e-5, out)
    # A pick that failed is -1; what its row computes is thrown away.
    expected = embedding[torch.tensor([9, 30, 0, 7, 0], device="cuda")]
    assert torch.equal(hidden, expected)
    check(out, torch.nn.functional.rms_norm(expected.float(), (256,), norm.float(), 1e-5))


def turned(x: torch.Tensor, rotation: Rotation, positions: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    cosine, sine = (table[positions][:, None] for table in rotation)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)


@NEEDS_HOPPER
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "num_qo_heads", "num_kv_heads", "head_dim", "has_extras"),
    [(5, 32, 8, 128, True), (96, 4, 4, 128, False), (33, 14, 2, 64, True), (8, 12, 4, 80, False)],
)
def test_heads_are_turned_and_written(
    dtype, rows, num_qo_heads, num_kv_heads, head_dim, has_extras
) -> None:
    heads = (num_qo_heads, num_kv_heads, num_kv_heads)
    matrices = weights(*((n * head_dim, 256) for n in heads), dtype=dtype)
    kernels = kernels_for(matrices, rows)
    x = normal(rows, 256, dtype=dtype)
    biases: Any = [normal(n * head_dim, dtype=dtype, seed=20 + n) for n in heads]
    q_norm, k_norm = (normal(head_dim, dtype=dtype, seed=seed) for seed in (30, 31))
    norms = HeadNorms(q_norm, k_norm, 1e-6)
    angles = normal(500, head_dim // 2, dtype=torch.float32)
    rotation = Rotation(angles.cos(), angles.sin())
    positions = (torch.arange(rows, device="cuda") * 37) % 500
    slots = (torch.arange(rows, device="cuda") * 29 + 5) % (3 * rows)
    slots[0] = -1
    pages = torch.zeros(3 * rows // 16 + 1, 2, num_kv_heads, 16, head_dim, dtype=dtype).cuda()
    q = torch.empty(rows, num_qo_heads, head_dim, dtype=dtype, device="cuda")
    kernels.rotate(
        kernels.product(matrices, padded(x, kernels.padded_rows)),
        biases if has_extras else (None, None, None),
        norms if has_extras else None,
        rotation,
        positions,
        slots,
        q,
        Pages(pages[:, 0], pages[:, 1]),
    )
    expected = []
    for index, (matrix, count) in enumerate(zip(matrices, heads, strict=True)):
        y = x.float() @ matrix.float().T
        if has_extras:
            y = y + biases[index].float()
        y = y.view(rows, count, head_dim)
        if has_extras and index < 2:
            weight = norms[index].float()
            y = torch.nn.functional.rms_norm(y, (head_dim,), weight, norms.epsilon)
        expected.append(turned(y, rotation, positions) if index < 2 else y)
    check(q, expected[0])
    written = slots[1:]
    check(pages[written // 16, 0, :, written % 16], expected[1][1:])
    check(pages[written // 16, 1, :, written % 16], expected[2][1:])
    # The row without a slot has written nothing.
    assert int(pages.abs().sum(dim=(2, 4)).count_nonzero()) == 2 * (rows - 1)
