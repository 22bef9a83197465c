"""ChunkCache in fp8 on a CUDA device."""

import numpy as np
import pytest
import torch

from chunkcache import ChunkCache, InvalidConfigError, reference
from chunkcache.kernels.driver import DeviceLimits
from chunkcache_testing.devices import to_cuda, to_numpy
from chunkcache_testing.kernels.device import NEEDS_FP8
from chunkcache_testing.kernels.harness import TOLERANCE
from chunkcache_testing.kernels.serving import Serving
from chunkcache_testing.prefix_kv import PrefixKv

pytestmark = NEEDS_FP8

HEADS, DIM, CHUNK = 2, 64, 16


def make(dtype="float8_e4m3", capacity=32, **options):
    return ChunkCache(
        2, HEADS, DIM, dtype=dtype, chunk_size=CHUNK, capacity=capacity, device="cuda", **options
    )


def pending_tokens(cache, seq):
    """How many tokens of a sequence are not computed."""
    info = cache.sequence(seq)
    return info.num_known_tokens - info.num_computed_tokens


def write(cache, seq, kv, tokens, first=0):
    """Compute tokens from `first` on, in float32."""
    with cache.plan([seq], [0, len(tokens) - first]) as plan:
        for layer in range(2):
            k, v = (to_cuda(part[first:]) for part in kv.keys_values(layer, tokens))
            cache.write_kv(layer, k, v, plan)
        cache.commit(plan)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e4m3", "fp8_e4m3", "fp8", torch.float8_e4m3fn]
)
def test_every_name(dtype):
    cache = make(dtype)
    assert cache.dtype == "float8_e4m3fn"
    assert cache.kv_layer(1).dtype == torch.float8_e4m3fn


def test_a_chunk_takes_half_the_bytes():
    sizes = {"chunk_size": CHUNK, "capacity_bytes": 2 * 2 * HEADS * CHUNK * DIM * 10}
    fp8 = ChunkCache(2, HEADS, DIM, dtype="fp8", device="cuda", **sizes)
    halves = ChunkCache(2, HEADS, DIM, dtype="float16", device="cuda", **sizes)
    assert (fp8.capacity, halves.capacity) == (10, 5)
    assert fp8.nbytes == halves.nbytes == sizes["capacity_bytes"]
    fp8.insert(range(20))
    assert fp8.stats().num_in_use == 2


@pytest.mark.parametrize("element", [torch.float16, torch.bfloat16])
def test_prefill_and_shared_decode(element):
    scale = np.array([[0.01, 0.2], [0.05, 0.02]], dtype=np.float32)
    cache = make(k_scale=scale, v_scale=torch.from_numpy(scale).cuda())
    kv = PrefixKv(2, HEADS, DIM, num_qo_heads=6)
    prompts = [[*range(40), i, *range(i)] for i in range(5)]
    seqs = [cache.insert(prompt).seq for prompt in prompts]
    for seq, prompt in zip(seqs, prompts, strict=True):
        write(cache, seq, kv, prompt, cache.sequence(seq).num_computed_tokens)
    for seq, prompt in zip(seqs, prompts, strict=True):
        cache.append(seq, 1)
        prompt.append(1)
    with cache.plan(seqs) as plan:
        for layer in range(2):
            rows = [kv.keys_values(layer, prompt) for prompt in prompts]
            k, v = (np.stack([row[i][-1] for row in rows]) for i in range(2))
            q = to_cuda(np.stack([kv.queries(layer, prompt)[-1] for prompt in prompts]))
            q = q.to(element)
            cache.write_kv(layer, to_cuda(k), to_cuda(v), plan)
            out = torch.full_like(q, float("nan"))
            cache.attend(layer, q, plan, out=out)
            for row, (k, v) in enumerate(rows):
                stored = [
                    reference.dequantise_fp8(reference.quantise_fp8(x, scale[layer]), scale[layer])
                    for x in (k, v)
                ]
                expected, _ = reference.attention(to_numpy(q[row : row + 1]), *stored)
                found = to_numpy(out[row : row + 1])
                assert reference.error(found, expected) <= TOLERANCE["E4M3"]
        cache.commit(plan)


def test_read_kv_gives_what_is_stored_times_its_scale():
    scale = np.array([[0.01, 0.2], [0.05, 0.02]], dtype=np.float32)
    cache = make(k_scale=scale, v_scale=0.25)
    kv = PrefixKv(2, HEADS, DIM)
    tokens = list(range(37))
    seq = cache.insert(tokens).seq
    write(cache, seq, kv, tokens)
    for layer in range(2):
        k, v = cache.read_kv(layer, seq, 3, 36)
        assert k.dtype == v.dtype == torch.float32
        for found, x, s in zip(
            (k, v), kv.keys_values(layer, tokens), (scale[layer], 0.25), strict=True
        ):
            expected = reference.dequantise_fp8(reference.quantise_fp8(x, s), s)[3:36]
            assert np.allclose(to_numpy(found), expected, rtol=1e-6, atol=0)


def test_copy_on_write_and_forks_keep_the_bits():
    cache = make(v_scale=0.1)
    kv = PrefixKv(2, HEADS, DIM)
    tokens = list(range(40))
    seq = cache.insert(tokens).seq
    write(cache, seq, kv, tokens)
    inserted = cache.insert([*tokens[:25], 99, 98])
    assert inserted.num_copied_tokens == 9
    forked = cache.fork(seq).seq
    for other, end in ((inserted.seq, 25), (forked, 40)):
        for layer in range(2):
            pairs = zip(
                cache.read_kv(layer, other, 0, end), cache.read_kv(layer, seq, 0, end), strict=True
            )
            assert all(torch.equal(a, b) for a, b in pairs)


def test_a_captured_step_follows_its_sequences():
    serving = Serving(rows=8, capacity=200, dtype="fp8")
    prompt = list(range(40))
    seqs = [serving.insert([*prompt, i]) for i in range(3)]
    rng = np.random.default_rng(5)
    for token in range(1, 40):
        serving.decode(seqs)
        change = rng.integers(4)
        if change == 0 and len(seqs) > 1:
            serving.remove(seqs.pop(rng.integers(len(seqs))))
        elif change == 1 and len(seqs) < 8:
            seqs.insert(rng.integers(len(seqs) + 1), serving.insert([*prompt[:35], token, 7]))
        serving.append([seq for seq in seqs if not pending_tokens(serving.cache, seq)], token)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_scale": np.ones((2, 3), np.float32)}, r"k_scale: got float32 \[2, 3\], allowed is a"),
        ({"v_scale": torch.ones(2, 2).half()}, r"v_scale: got float16 \[2, 2\], allowed is a numb"),
        ({"v_scale": 0}, r"v_scale: got a scale of 0\.0"),
        ({"k_scale": 1.0, "dtype": "float16"}, r"k_scale: got 1\.0 for K and V of float16"),
        ({"dtype": torch.float8_e5m2}, "dtype: got float8_e5m2"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(InvalidConfigError, match=message):
        make(**options)


def test_queries_in_another_type_are_refused():
    cache = make()
    seq = cache.insert([1]).seq
    with (
        cache.plan([seq]) as plan,
        pytest.raises(InvalidConfigError, match=r"q: got float32 .*allowed is float16 or bfloat16"),
    ):
        cache.attend(0, torch.zeros(1, 2, DIM, device="cuda"), plan)


def test_older_devices_are_refused(monkeypatch):
    limits = {"num_multiprocessors": 108, "shared_bytes": 166912, "capability": (8, 0)}
    monkeypatch.setattr("chunkcache.kernels.tpp.limits", lambda _: DeviceLimits(**limits))
    with pytest.raises(InvalidConfigError, match=r"dtype: got float8_e4m3fn .*capability 8\.0"):
        make()
