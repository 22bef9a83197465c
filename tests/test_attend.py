"""The grid of shapes and dtypes, on every instruction set, against the reference in float64."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from chunkcache import ChunkCache, attention, reference
from chunkcache_testing.devices import NEEDS_CUDA, NumpyCudaCache
from chunkcache_testing.prefix_kv import (
    TOLERANCE,
    Entry,
    PrefixKv,
    begin,
    check_attention,
    pending,
    run_step,
    write,
)

HEAD_DIMS = (8, 24, 64, 80, 96, 112, 128, 192, 256)
RATIOS = (1, 3, 4, 7, 8)
DTYPES = ("float32", "float16", "bfloat16")
KERNELS = [
    {"isa": isa, "sharing": sharing}
    for isa, sharing in itertools.product(attention.available_isas(), ("auto", "always", "never"))
]

#: Trees of prompts, as lists of (salt, tokens); the first token tells the roots apart.
TREES = {
    "one token": [("", [3])],
    "no sharing": [("", [i, *range(n)]) for i, n in enumerate((0, 1, 14, 15, 16, 40))],
    "all shared": [("", range(32))] * 4,
    "equal prompts": [("", range(37))] * 3,
    "three levels": [
        ("", [*range(32), branch, *range(16, 31), leaf, *range(extra)])
        for branch, leaf, extra in itertools.product((100, 200), (1, 2, 3), (0, 17))
    ],
    "several roots": [
        *[("a", [*range(20), leaf]) for leaf in (1, 2)],
        *[("b", [*range(20), leaf]) for leaf in (1, 2)],
        ("", range(18)),
    ],
}


def grown(
    tree: Sequence[tuple], num_kv_heads: int, head_dim: int, ratio: int, dtype: str
) -> tuple[ChunkCache, PrefixKv, list[Entry]]:
    """Insert the prompts of a tree into a new cache."""
    cache = ChunkCache(
        1, num_kv_heads, head_dim, dtype=dtype, capacity=64, chunk_size=16, num_threads=2
    )
    kv = PrefixKv(1, num_kv_heads, head_dim, num_qo_heads=num_kv_heads * ratio, dtype=dtype)
    seqs = [cache.insert(tokens, cache_salt=salt).seq for salt, tokens in tree]
    pairs = zip(seqs, tree, strict=True)
    return cache, kv, [pending(cache, seq, tokens, salt) for seq, (salt, tokens) in pairs]


def check_prefill_and_decode(
    cache: ChunkCache, kv: PrefixKv, entries: Sequence[Entry], **options
) -> None:
    """Check a step that computes the prompts, and one with a token more for each sequence."""
    with begin(cache, entries) as plan:
        write(cache, kv, plan, entries)
        check_attention(cache, kv, plan, entries, kernels=KERNELS, **options)
        cache.commit(plan)
    cache.append_batch([entry.seq for entry in entries], range(50, 50 + len(entries)))
    decoded = [
        Entry(entry.seq, [*entry.tokens, 50 + i], entry.end, 1, entry.salt)
        for i, entry in enumerate(entries)
    ]
    with begin(cache, decoded) as plan:
        write(cache, kv, plan, decoded)
        check_attention(cache, kv, plan, decoded, kernels=KERNELS, **options)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_and_dtypes(dtype: str, head_dim: int, ratio: int) -> None:
    cache, kv, entries = grown(TREES["three levels"][::3], 2, head_dim, ratio, dtype)
    check_prefill_and_decode(cache, kv, entries, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_trees(dtype: str, tree: str) -> None:
    cache, kv, entries = grown(TREES[tree], 2, 16, 3, dtype)
    check_prefill_and_decode(cache, kv, entries, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("window_left", [0, 1, 15, 16, 20, 40, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_shorter_and_longer_than_the_shared_part(dtype: str, window_left: int) -> None:
    cache, kv, entries = grown(TREES["three levels"], 2, 16, 2, dtype)
    check_prefill_and_decode(
        cache, kv, entries, tolerance=TOLERANCE[dtype], window_left=window_left
    )


@pytest.mark.parametrize("window_left", [-1, 20])
@pytest.mark.parametrize("logits_soft_cap", [0.5, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_caps(dtype: str, logits_soft_cap: float, window_left: int) -> None:
    cache, kv, entries = grown(TREES["three levels"], 2, 16, 2, dtype)
    check_prefill_and_decode(
        cache,
        kv,
        entries,
        tolerance=TOLERANCE[dtype],
        logits_soft_cap=logits_soft_cap,
        window_left=window_left,
        sm_scale=2.0,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_number_of_threads(dtype: str) -> None:
    results = []
    for num_threads in (1, 2, 3, 8):
        cache = ChunkCache(
            1, 2, 64, dtype=dtype, capacity=64, chunk_size=16, num_threads=num_threads
        )
        kv = PrefixKv(1, 2, 64, num_qo_heads=8, dtype=dtype)
        seqs = [cache.insert(tokens).seq for _, tokens in TREES["three levels"]]
        entries = [
            pending(cache, seq, tokens)
            for seq, (_, tokens) in zip(seqs, TREES["three levels"], strict=True)
        ]
        with begin(cache, entries) as plan:
            write(cache, kv, plan, entries)
            q = np.concatenate([kv.queries(0, e.tokens[: e.end])[e.start :] for e in entries])
            results.append(cache.attend(0, q, plan, return_lse=True))
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


def scores_of(scale: float, dtype: str = "float32") -> tuple[ChunkCache, list, np.ndarray]:
    """A written cache of one sequence, and one query whose scores are about `scale` large."""
    rng = np.random.default_rng(3)
    cache = ChunkCache(1, 1, 16, dtype=dtype, capacity=8, chunk_size=16)
    kind = PrefixKv(1, 1, 16, dtype=dtype).dtype
    seq = cache.insert(range(40)).seq
    k, v = rng.uniform(-1, 1, (2, 40, 1, 16)).astype(kind)
    q = (rng.uniform(-1, 1, (40, 1, 16)) * scale).astype(kind)
    plan = cache.plan([seq], [0, 40])
    cache.write_kv(0, k, v, plan)
    return cache, [q, k, v], plan


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_are_within_what_float32_scores_allow(dtype: str, kernel: dict) -> None:
    cache, (q, k, v), plan = scores_of(5e3, dtype)
    scores = np.einsum("qhd,khd->qkh", q.astype(float), k.astype(float))
    assert np.abs(scores).max() > 1e4
    out, lse = cache.attend(0, q, plan, sm_scale=1.0, return_lse=True, **kernel)
    expected, expected_lse = reference.attention(q, k, v, sm_scale=1.0)
    # A score of 1e4 in float32 is off by up to 1e-3, and so is the logarithm of each weight.
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=2e-2)
    assert reference.error(out, expected) <= 2e-2


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_very_negative_scores_stay_finite(kernel: dict) -> None:
    cache, (q, k, v), plan = scores_of(1.0)
    k, q = np.abs(k) + 0.5, -(np.abs(q) + 0.5) * 3e3
    cache.write_kv(0, k, v, plan)
    out, lse = cache.attend(0, q, plan, sm_scale=1.0, return_lse=True, **kernel)
    expected, expected_lse = reference.attention(q, k, v, sm_scale=1.0)
    assert expected_lse.max() < -1e4
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    assert reference.error(out, expected) <= 2e-2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_past_the_end_of_a_chunk_does_not_leak(dtype: str, bad: float) -> None:
    """A chunk that held NaN or Inf is given to another sequence, which fills only its head."""
    cache = ChunkCache(1, 2, 16, dtype=dtype, capacity=1, chunk_size=16)
    kv = PrefixKv(1, 2, 16, num_qo_heads=4, dtype=dtype)
    old = cache.insert(range(15)).seq
    rows = np.full((15, 2, 16), bad, kv.dtype)
    with cache.plan([old], [0, 15]) as plan:
        cache.write_kv(0, rows, rows, plan)
        cache.commit(plan)
    cache.remove(old)
    new = cache.insert(range(100, 103)).seq
    entries = [pending(cache, new, range(100, 103))]
    with begin(cache, entries) as plan:
        write(cache, kv, plan, entries)
        check_attention(cache, kv, plan, entries, kernels=KERNELS, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_outside_the_window_do_not_leak(dtype: str) -> None:
    cache = ChunkCache(1, 1, 16, dtype=dtype, capacity=4, chunk_size=16)
    kv = PrefixKv(1, 1, 16, dtype=dtype)
    seq = cache.insert(range(40)).seq
    k, v = (part.copy() for part in kv.keys_values(0, range(40)))
    k[:20], v[:20] = np.nan, np.nan
    q = kv.queries(0, range(40))
    expected, _ = reference.attention(q[39:], k[30:], v[30:])
    with cache.plan([seq], [0, 40]) as plan:
        cache.write_kv(0, k, v, plan)
        for kernel in KERNELS:
            out = cache.attend(0, q, plan, window_left=9, **kernel)
            assert reference.error(out[39:], expected) <= TOLERANCE[dtype]


def test_torch_and_numpy_give_the_same_bits() -> None:
    cache, kv, entries = grown(TREES["three levels"], 2, 64, 2, "float32")
    with begin(cache, entries) as plan:
        write(cache, kv, plan, entries)
        q = np.concatenate([kv.queries(0, e.tokens[: e.end])[e.start :] for e in entries])
        out = cache.attend(0, q, plan)
        np.testing.assert_array_equal(cache.attend(0, torch.from_numpy(q), plan).numpy(), out)


#: What the kernels on a CUDA device are compiled for.
CUDA_HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)


def check_on_cuda(tree: str, head_dim: int, ratio: int, dtype: str, **options) -> None:
    kv = PrefixKv(1, 2, head_dim, num_qo_heads=2 * ratio, dtype=dtype)
    cache = NumpyCudaCache(1, 2, head_dim, dtype=dtype, capacity=64, chunk_size=16)
    seqs = [cache.insert(tokens, cache_salt=salt).seq for salt, tokens in TREES[tree]]
    entries = [
        pending(cache, seq, tokens, salt)
        for seq, (salt, tokens) in zip(seqs, TREES[tree], strict=True)
    ]
    run_step(cache, kv, entries, **options)
    for step in range(2):
        tokens = range(50 + step, 50 + step + len(seqs))
        cache.append_batch(seqs, tokens)
        for entry, token in zip(entries, tokens, strict=True):
            entry.tokens = [*entry.tokens, token]
        entries = [pending(cache, e.seq, e.tokens, e.salt) for e in entries]
        run_step(cache, kv, entries, **options)


@NEEDS_CUDA
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("head_dim", CUDA_HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_shapes_and_dtypes_on_cuda(dtype: str, head_dim: int, ratio: int) -> None:
    check_on_cuda("three levels", head_dim, ratio, dtype)


@NEEDS_CUDA
@pytest.mark.parametrize("tree", TREES)
def test_trees_on_cuda(tree: str) -> None:
    check_on_cuda(tree, 64, 3, "float16")


@NEEDS_CUDA
@pytest.mark.parametrize("window_left", [0, 15, 20, 1000])
@pytest.mark.parametrize("logits_soft_cap", [None, 30.0])
def test_windows_and_caps_on_cuda(window_left: int, logits_soft_cap: float | None) -> None:
    options = {"window_left": window_left, "logits_soft_cap": logits_soft_cap}
    check_on_cuda("three levels", 64, 2, "float16", **options)
