"""ChunkCache on a CUDA device: arena, captured steps, streams, refusals."""

import numpy as np
import pytest
import torch

from chunkcache import (
    ChunkCache,
    InvalidConfigError,
    KernelError,
    Plan,
    PrefixTree,
    StalePlanError,
    reference,
)
from chunkcache_testing.devices import NEEDS_CUDA, to_cuda, to_numpy
from chunkcache_testing.kernels.serving import Serving
from chunkcache_testing.prefix_kv import Entry, PrefixKv

pytestmark = NEEDS_CUDA

#: The handle of a tree's first sequence.
FIRST = PrefixTree(1).insert([0]).seq


class TestCapturedStep:
    def test_sequences_grow_and_fill_chunks(self):
        serving = Serving(rows=5)
        seqs = [serving.insert([i, *range(14 + i)]) for i in range(3)]
        for token in range(1, 40):
            serving.decode(seqs)
            serving.append(seqs, token)

    def test_sequences_join_leave_and_fork(self):
        serving = Serving(rows=8, capacity=200)
        prompt = list(range(40))
        seqs = [serving.insert([*prompt, i]) for i in range(3)]
        rng = np.random.default_rng(5)
        for token in range(1, 60):
            serving.decode(seqs)
            change = rng.integers(4)
            if change == 0 and len(seqs) > 1:
                serving.remove(seqs.pop(rng.integers(len(seqs))))
            elif change == 1 and len(seqs) < 8:
                seqs.insert(rng.integers(len(seqs) + 1), serving.insert([*prompt[:35], token, 7]))
            elif change == 2 and len(seqs) < 8:
                seqs.append(serving.fork(seqs[rng.integers(len(seqs))]))
            serving.append([seq for seq in seqs if _left(serving, seq) == 0], token)

    def test_chunks_are_evicted_and_used_again(self):
        serving = Serving(rows=2, capacity=12)
        for round_ in range(12):
            seqs = [serving.insert([round_, i, *range(30)]) for i in range(2)]
            for token in range(1, 20):
                serving.decode(seqs)
                serving.append(seqs, token)
            for seq in seqs:
                serving.remove(seq)
        assert serving.cache.stats().num_evicted > 0

    def test_padding_rows_anywhere(self):
        serving = Serving(rows=6)
        a, b = serving.insert(range(20)), serving.insert([5, *range(20)])
        serving.decode([None, a, None, b])
        serving.append([a, b], 3)
        serving.decode([b, None, None, None, None, a])

    def test_eager_steps_between_replays(self):
        serving = Serving(rows=4)
        seqs = [serving.insert(range(20))]
        for token in range(1, 10):
            serving.decode(seqs)
            serving.append(seqs, token)
            if len(seqs) < 4:
                seqs.append(serving.insert([token, *range(50)]))

    def test_copies_of_tables_are_steps_with_a_structural_change(self):
        serving = Serving(rows=4)
        seqs = [serving.insert([i, *range(15)]) for i in range(4)]
        serving.decode(seqs)
        copied = []
        for token in range(1, 64):
            serving.append(seqs, token)
            before = serving.cache.stats().table_copies
            serving.decode(seqs)
            copied.append(serving.cache.stats().table_copies - before)
        # Token 16 of each went first; a chunk is entered each 16 tokens after it.
        assert [i for i, n in enumerate(copied) if n] == [0, 16, 32, 48]
        assert sum(copied) == 4

    def test_the_next_step_is_planned_before_this_one_is_committed(self):
        serving = Serving(rows=2)
        seqs = [serving.insert([i, *range(20)]) for i in range(2)]
        serving.decode(seqs)
        serving.append(seqs, 1)
        serving.append(seqs, 2)
        entries = [_entry(serving, seq, 1) for seq in seqs]
        serving.fill(entries)
        first = serving.plan(seqs)
        before = serving.cache.stats().table_copies
        serving.step.replay(first)
        second = serving.plan(seqs)
        serving.check(entries)
        following = [_entry(serving, seq, 0) for seq in seqs]
        serving.fill(following)
        serving.step.replay(second)
        serving.check(following)
        assert serving.cache.stats().table_copies == before
        serving.cache.commit(first)
        serving.cache.commit(second)

    def test_a_step_is_captured_with_padding_alone(self):
        serving = Serving(rows=5, capacity=200)
        with torch.inference_mode():
            steps = []
            for rows in (2, 5):
                with serving.cache.plan([None] * rows) as plan:
                    steps.append(serving.capture(plan))
        smaller, serving.step = steps
        seqs = [serving.insert([*range(300), i]) for i in range(5)]
        for token in range(1, 40):
            serving.decode(seqs)
            serving.append(seqs, token)
        serving.step = smaller
        serving.decode(seqs[:2])

    def test_more_rows_than_captured_are_refused(self):
        serving = Serving(rows=2)
        seqs = [serving.insert([i, 1]) for i in range(3)]
        serving.decode(seqs[:2])
        serving.append(seqs[:2], 1)
        plan = serving.plan(seqs)
        with pytest.raises(InvalidConfigError, match="plan: got 3 rows"):
            serving.step.replay(plan)

    def test_a_large_step_beside_it_leaves_its_tables(self):
        serving = Serving(rows=1, capacity=700)
        a = serving.insert(range(20))
        serving.decode([a])
        serving.insert([7, *range(9000)])
        serving.append([a], 1)
        serving.decode([a])

    def test_a_closed_or_replayed_plan_is_refused(self):
        serving = Serving(rows=1)
        a = serving.insert(range(20))
        serving.decode([a])
        serving.append([a], 1)
        plan = serving.plan([a])
        serving.step.replay(plan)
        with pytest.raises(StalePlanError):
            serving.step.replay(plan)
        plan.close()
        with pytest.raises(StalePlanError):
            serving.step.replay(plan)

    def test_a_plan_of_another_cache_is_refused(self):
        serving, other = Serving(rows=1), Serving(rows=1)
        serving.decode([serving.insert(range(20))])
        plan = other.plan([other.insert(range(20))])
        with pytest.raises(InvalidConfigError, match="plan"):
            serving.step.replay(plan)

    def test_a_step_without_a_capture_is_refused(self):
        serving = Serving(rows=1)
        plan = serving.plan([serving.insert(range(20))])
        with pytest.raises(KernelError, match="replay"):
            serving.cache.capture(plan).replay(plan)

    def test_another_plan_inside_a_capture_is_refused(self):
        serving = Serving(rows=1)
        a, b = serving.insert(range(20)), serving.insert([9, *range(20)])
        plan, other = serving.plan([a]), serving.plan([b])
        with (
            pytest.raises(InvalidConfigError, match="inside a capture"),
            serving.cache.capture(plan),
        ):
            serving.cache.write_kv(0, serving.k[0], serving.v[0], other)


def _left(serving: Serving, seq: int) -> int:
    info = serving.cache.sequence(seq)
    return info.num_known_tokens - info.num_computed_tokens


def _entry(serving: Serving, seq: int, behind: int) -> Entry:
    tokens = serving.tokens[seq]
    end = len(tokens) - behind
    return Entry(seq, tokens[:end], end - 1, 1)


class TestStreams:
    def test_work_of_several_streams_is_in_order(self):
        serving = Serving(rows=2)
        seqs = [serving.insert([i, *range(20)]) for i in range(2)]
        serving.decode(seqs)
        streams = [torch.cuda.Stream() for _ in range(3)]
        for token in range(1, 20):
            serving.append(seqs, token)
            entries = [_entry(serving, seq, 0) for seq in seqs]
            serving.fill(entries)
            torch.cuda.synchronize()
            stream = streams[token % 3]
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
            plan = serving.plan(seqs)
            serving.step.replay(plan, stream=stream)
            serving.cache.commit(plan)
            k, _ = serving.cache.read_kv(0, seqs[0], 0, 20 + token)
            assert not k.isnan().any()
            torch.cuda.synchronize()
            serving.check(entries)

    def test_a_freed_chunk_is_not_written_while_it_is_read(self):
        kv = PrefixKv(1, 2, 64, num_qo_heads=4, dtype="float16")
        cache = ChunkCache(1, 2, 64, dtype="float16", chunk_size=16, capacity=4, device="cuda")
        tokens = list(range(40))
        seq = cache.insert(tokens).seq
        k, v = (to_cuda(part) for part in kv.keys_values(0, tokens))
        q = to_cuda(kv.queries(0, tokens))
        slow = torch.cuda.Stream()
        plan = cache.plan([seq], [0, 40])
        cache.write_kv(0, k, v, plan)
        torch.cuda.synchronize()
        with torch.cuda.stream(slow):
            torch.cuda._sleep(50_000_000)
            out = cache.attend(0, q, plan)
        cache.commit(plan)
        cache.remove(seq)
        cache.clear()
        other = cache.insert(range(100, 160)).seq
        noise = torch.full((60, 2, 64), 1e4, device="cuda")
        with cache.plan([other], [0, 60]) as following:
            cache.write_kv(0, noise, noise, following)
            cache.commit(following)
        torch.cuda.synchronize()
        expected, _ = reference.attention(to_numpy(q), to_numpy(k), to_numpy(v))
        assert reference.error(to_numpy(out), expected) < 1e-2

    def test_a_stream_is_given_by_handle(self):
        cache, plan, k = _one_step()
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        cache.write_kv(0, k, k, plan, stream=stream.cuda_stream)
        read, _ = cache.read_kv(0, FIRST, 0, 3, stream=stream)
        stream.synchronize()
        assert torch.equal(read, k)

    @pytest.mark.parametrize("stream", ["nothing", 3.5])
    def test_what_is_no_stream_is_refused(self, stream):
        cache, plan, k = _one_step()
        with pytest.raises(InvalidConfigError, match="stream"):
            cache.write_kv(0, k, k, plan, stream=stream)


def _one_step() -> tuple[ChunkCache, Plan, torch.Tensor]:
    """A cache of one sequence, the first, with a step of its three tokens."""
    cache = ChunkCache(2, 2, 64, dtype="float16", chunk_size=16, capacity=4, device="cuda")
    seq = cache.insert([1, 2, 3]).seq
    k = torch.randn(3, 2, 64, device="cuda").half()
    return cache, cache.plan([seq], [0, 3]), k


class TestArguments:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda q: q.float(), "q: got float32"),
            (lambda q: q.cpu(), "q: got cpu"),
            (lambda q: q[:2], "q: got float16"),
            (lambda q: q[:, :3], "num_qo_heads: got 3"),
            (lambda q: q.transpose(1, 2).contiguous().transpose(1, 2), "q: got strides"),
        ],
    )
    def test_a_wrong_query_is_refused_by_name(self, change, message):
        cache, plan, k = _one_step()
        q = torch.randn(3, 4, 64, device="cuda").half()
        cache.write_kv(0, k, k, plan)
        with pytest.raises(InvalidConfigError, match=message):
            cache.attend(0, change(q), plan)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda k: k[:2], "k: got float16"),
            (lambda k: k.double(), "k: got float64"),
            (lambda k: k.cpu(), "k: got cpu"),
        ],
    )
    def test_wrong_keys_are_refused_by_name(self, change, message):
        cache, plan, k = _one_step()
        with pytest.raises(InvalidConfigError, match=message):
            cache.write_kv(0, change(k), k, plan)

    @pytest.mark.parametrize("layer", [-1, 2, "0"])
    def test_a_wrong_layer_is_refused(self, layer):
        cache, plan, k = _one_step()
        with pytest.raises(InvalidConfigError, match="layer"):
            cache.write_kv(layer, k, k, plan)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dtype": "float32"}, "dtype: got float32"),
            ({"head_dim": 72}, "head_dim: got 72"),
            ({"chunk_size": 8}, "chunk_size: got 8"),
            ({"capacity": 0}, "capacity: got 0"),
            ({"capacity": None, "memory_fraction": 1.5}, "memory_fraction: got 1.5"),
            ({"capacity": None, "capacity_bytes": 10}, "capacity_bytes: got 10"),
            ({"device": "cuda:77"}, "device: got 'cuda:77'"),
            ({"num_threads": 2}, "num_threads: got 2"),
            ({"num_qo_heads": 3}, "num_qo_heads: got 3"),
        ],
    )
    def test_a_configuration_is_refused_by_name(self, options, message):
        sizes = {
            "num_layers": 1,
            "num_kv_heads": 2,
            "head_dim": 64,
            "dtype": "float16",
            "capacity": 4,
            "device": "cuda",
        }
        with pytest.raises(InvalidConfigError, match=message):
            ChunkCache(**{**sizes, **options})


class TestArena:
    def test_a_layer_is_a_view_of_pages(self):
        cache, plan, k = _one_step()
        cache.write_kv(1, k, -k, plan)
        layer = cache.kv_layer(1)
        assert layer.shape == (4, 2, 2, 16, 64)
        chunk = cache.sequence(FIRST).chunk_ids[0]
        assert torch.equal(layer[chunk, 0, :, :3].transpose(0, 1), k)
        assert torch.equal(layer[chunk, 1, :, :3].transpose(0, 1), -k)
        assert layer.data_ptr() == cache.kv_layer(1).data_ptr()

    def test_several_caches_side_by_side(self):
        first, second = Serving(rows=1), Serving(rows=1)
        a, b = first.insert(range(20)), second.insert(range(5, 40))
        for token in range(1, 20):
            first.decode([a])
            second.decode([b])
            first.append([a], token)
            second.append([b], token)

    def test_a_fraction_of_the_free_memory(self):
        cache = ChunkCache(
            4, 2, 64, dtype="bfloat16", device=torch.device("cuda", 0), memory_fraction=0.05
        )
        free, _ = torch.cuda.mem_get_info()
        assert cache.nbytes <= free
        assert cache.capacity == cache.nbytes // (4 * 2 * 2 * 64 * 64 * 2)

    def test_the_far_end_of_a_large_arena(self):
        free, _ = torch.cuda.mem_get_info()
        chunk_bytes = 2 * 8 * 64 * 128 * 2
        chunks = min(42 * 10**9, int(free * 0.8)) // chunk_bytes
        cache = ChunkCache(
            1, 8, 128, dtype="float16", chunk_size=64, capacity=chunks, device="cuda"
        )
        assert cache.nbytes > 40e9 or free < 60e9
        filler = np.arange((chunks - 6) * 64, dtype=np.uint32)
        cache.insert(filler)
        kv = PrefixKv(1, 8, 128, num_qo_heads=16, dtype="float16")
        tokens = [3, *range(300)]
        seq = cache.insert(tokens).seq
        assert min(cache.sequence(seq).chunk_ids) >= chunks - 6
        k, v = (to_cuda(part) for part in kv.keys_values(0, tokens))
        q = to_cuda(kv.queries(0, tokens))
        with cache.plan([seq], [0, 301]) as plan:
            cache.write_kv(0, k, v, plan)
            out = cache.attend(0, q, plan)
            cache.commit(plan)
        expected, _ = reference.attention(to_numpy(q), to_numpy(k), to_numpy(v))
        assert reference.error(to_numpy(out), expected) < 1e-2
        assert torch.equal(cache.read_kv(0, seq, 0, 301)[0], k)


def test_the_same_plan_gives_the_same_bits():
    serving = Serving(rows=4)
    seqs = [serving.insert([*range(100), i]) for i in range(4)]
    plan = serving.plan(seqs)
    k = torch.randn(4, 2, 64, device="cuda").half()
    q = torch.randn(4, 6, 64, device="cuda").half()
    serving.cache.write_kv(0, k, k, plan)
    outs = [serving.cache.attend(0, q, plan) for _ in range(3)]
    assert not outs[0].isnan().any()
    assert all(torch.equal(out, outs[0]) for out in outs)
