"""The tree with K/V: what is stored, copied, shared and read is the right thing."""

import subprocess
import sys
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from chunkcache import (
    ChunkCache,
    InvalidConfigError,
    OutOfChunksError,
    StalePlanError,
    UnknownSequenceError,
)
from chunkcache_testing.devices import DEVICES, NumpyCudaCache
from chunkcache_testing.prefix_kv import (
    PrefixKv,
    begin,
    check_attention,
    pending,
    run_step,
    write,
)


class Place:
    """Where `make` makes its caches."""

    device = "cpu"


@pytest.fixture(params=DEVICES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Place, "device", request.param)


def make(capacity: int = 32, **options) -> tuple[Any, PrefixKv]:
    if Place.device == "cuda":
        options["dtype"] = "float16"
        cache = NumpyCudaCache(2, 2, 64, capacity=capacity, chunk_size=16, **options)
        return cache, PrefixKv(2, 2, 64, num_qo_heads=4, dtype="float16")
    cache = ChunkCache(2, 2, 8, capacity=capacity, chunk_size=16, num_threads=1, **options)
    return cache, PrefixKv(2, 2, 8, num_qo_heads=4)


def finish(cache: ChunkCache, kv: PrefixKv, *sequences: tuple) -> None:
    """Compute all that is left of some (seq, tokens) or (seq, tokens, salt), in one step."""
    run_step(cache, kv, [pending(cache, *sequence) for sequence in sequences])


@pytest.mark.usefixtures("place")
class TestWhollyCachedPrompt:
    @pytest.mark.parametrize("length", [32, 40])
    def test_its_one_query_is_right(self, length: int) -> None:
        cache, kv = make()
        tokens = range(length)
        finish(cache, kv, (cache.insert(tokens).seq, tokens))
        again = cache.insert(tokens)
        assert (again.cached_tokens, again.num_computed_tokens) == (length, length - 1)
        finish(cache, kv, (again.seq, tokens))

    def test_the_shared_chunk_keeps_its_bits(self) -> None:
        cache, kv = make()
        tokens = range(32)
        first = cache.insert(tokens).seq
        finish(cache, kv, (first, tokens))
        before = cache.read_kv(0, first, 0, 32)
        again = cache.insert(tokens).seq
        with cache.plan([again]) as plan:
            wrong = np.full((1, *kv.kv_shape), 7.0, dtype=kv.dtype)
            cache.write_kv(0, wrong, wrong, plan)
            cache.commit(plan)
        for old, new in zip(before, cache.read_kv(0, first, 0, 32), strict=True):
            np.testing.assert_array_equal(old, new)


@pytest.mark.usefixtures("place")
class TestEqualPromptsTogether:
    @pytest.mark.parametrize("count", [2, 50])
    def test_one_step_computes_the_common_chunks_once_and_all_outputs_are_right(
        self, count: int
    ) -> None:
        cache, kv = make(capacity=2 + count)
        tokens = range(40)
        seqs = [cache.insert(tokens).seq for _ in range(count)]
        entries = [pending(cache, seq, tokens) for seq in seqs]
        assert [entry.count for entry in entries] == [40] + [8] * (count - 1)
        run_step(cache, kv, entries)
        assert cache.stats().num_in_use == 2 + count

    def test_a_cancelled_writer_half_way_leaves_the_rest_to_the_next(self) -> None:
        cache, kv = make()
        tokens = range(40)
        first, second, third = (cache.insert(tokens).seq for _ in range(3))
        run_step(cache, kv, [pending(cache, first, tokens, count=20)])
        (inherited,) = cache.remove(first)
        assert (inherited.seq, inherited.begin, inherited.end) == (second, 20, 32)
        finish(cache, kv, (second, tokens), (third, tokens))

    def test_a_writer_cancelled_during_its_step_is_inherited_at_the_commit(self) -> None:
        cache, kv = make()
        tokens = range(40)
        first, second = (cache.insert(tokens).seq for _ in range(2))
        entries = [pending(cache, first, tokens, count=20)]
        with begin(cache, entries) as plan:
            write(cache, kv, plan, entries)
            assert cache.remove(first) == []
            (inherited,) = cache.commit(plan)
        assert (inherited.seq, inherited.begin, inherited.end) == (second, 20, 32)
        finish(cache, kv, (second, tokens))


@pytest.mark.usefixtures("place")
class TestCopies:
    def test_a_diverging_prompt_gets_the_equal_head_of_the_chunk(self) -> None:
        cache, kv = make()
        first = list(range(40))
        finish(cache, kv, (cache.insert(first).seq, first))
        second = [*range(36), 500, 501, 502]
        result = cache.insert(second)
        assert (result.num_matched_tokens, result.num_copied_tokens) == (32, 4)
        finish(cache, kv, (result.seq, second))

    def test_an_unwritten_head_is_not_copied_but_computed(self) -> None:
        cache, kv = make()
        first, second = list(range(20)), [*range(18), 500]
        a, b = cache.insert(first), cache.insert(second)
        assert (b.num_matched_tokens, b.num_copied_tokens) == (16, 0)
        finish(cache, kv, (a.seq, first), (b.seq, second))

    @pytest.mark.parametrize("length", [32, 37])
    def test_forks_diverge_without_seeing_each_other(self, length: int) -> None:
        cache, kv = make()
        a_tokens = list(range(length))
        a = cache.insert(a_tokens).seq
        finish(cache, kv, (a, a_tokens))
        b = cache.fork(a).seq
        b_tokens = [*a_tokens, 900]
        a_tokens = [*a_tokens, 700]
        cache.append(a, 700)
        cache.append(b, 900)
        finish(cache, kv, (a, a_tokens), (b, b_tokens))

    def test_a_fork_of_an_unwritten_leaf_is_right_after_the_commit(self) -> None:
        cache, kv = make()
        tokens = list(range(20))
        a = cache.insert(tokens).seq
        fork = cache.fork(a)
        assert fork.waiting
        finish(cache, kv, (a, tokens))
        cache.append(fork.seq, 55)
        finish(cache, kv, (fork.seq, [*tokens, 55]))

    def test_truncate_into_a_shared_chunk_copies_its_head(self) -> None:
        cache, kv = make()
        tokens = list(range(32))
        a = cache.insert(tokens).seq
        finish(cache, kv, (a, tokens))
        b = cache.insert(tokens).seq
        finish(cache, kv, (b, tokens))
        cache.truncate(b, 20)
        cache.append(b, [800, 801])
        finish(cache, kv, (b, [*tokens[:20], 800, 801]))
        cache.append(a, 1)
        finish(cache, kv, (a, [*tokens, 1]))


@pytest.mark.usefixtures("place")
class TestSteps:
    def test_a_batch_keeps_the_callers_order_with_padding(self) -> None:
        cache, kv = make()
        prompts = [[7, *range(20)], [*range(30)], [7, *range(10)]]
        seqs = [cache.insert(tokens).seq for tokens in prompts]
        a, b, c = (pending(cache, *pair) for pair in zip(seqs, prompts, strict=True))
        run_step(cache, kv, [None, c, None, b, a, None])

    def test_a_prompt_may_be_computed_in_pieces(self) -> None:
        cache, kv = make()
        tokens = range(50)
        seq = cache.insert(tokens).seq
        for count in (1, 15, 20, 14):
            run_step(cache, kv, [pending(cache, seq, tokens, count=count)])

    def test_an_aborted_step_counts_as_nothing(self) -> None:
        cache, kv = make()
        tokens = range(20)
        seq = cache.insert(tokens).seq
        before = cache.sequence(seq)
        with cache.plan([seq], [0, 20]) as plan:
            wrong = np.full((20, *kv.kv_shape), 7.0, dtype=kv.dtype)
            cache.write_kv(0, wrong, wrong, plan)
        assert cache.sequence(seq) == before
        finish(cache, kv, (seq, tokens))

    def test_a_plan_that_is_dropped_is_aborted(self) -> None:
        cache, _ = make()
        seq = cache.insert(range(20)).seq
        plan = cache.plan([seq])
        del plan
        cache.remove(seq)
        assert cache.stats().num_free == 32

    def test_the_next_step_can_be_planned_while_one_runs(self) -> None:
        cache, kv = make()
        tokens = list(range(20))
        seq = cache.insert(tokens).seq
        entries = [pending(cache, seq, tokens)]
        with begin(cache, entries) as plan:
            cache.reserve([seq])
            with cache.plan([seq]) as following:
                write(cache, kv, plan, entries)
                check_attention(cache, kv, plan, entries)
                cache.commit(plan)
                cache.append(seq, 77)
                entry = pending(cache, seq, [*tokens, 77])
                write(cache, kv, following, [entry])
                check_attention(cache, kv, following, [entry])
                cache.commit(following)

    def test_operations_on_the_tree_do_not_disturb_a_plan(self) -> None:
        cache, kv = make(capacity=4)
        tokens = range(32)
        seq = cache.insert(tokens).seq
        finish(cache, kv, (seq, range(32)))
        again = cache.insert(tokens).seq
        entries = [pending(cache, again, tokens)]
        with begin(cache, entries) as plan:
            cache.remove(seq)
            cache.remove(again)
            assert cache.evict(4) == 0
            cache.insert(range(100, 132))
            with pytest.raises(OutOfChunksError):
                cache.insert(range(200, 201))
            check_attention(cache, kv, plan, entries)

    def test_namespaces_have_their_own_kv(self) -> None:
        cache, kv = make()
        tokens = range(20)
        a = cache.insert(tokens, cache_salt="a").seq
        b = cache.insert(tokens, cache_salt="b").seq
        finish(cache, kv, (a, tokens, "a"), (b, tokens, "b"))

    def test_without_sharing_everything_is_still_right(self) -> None:
        cache, kv = make(enable_prefix_sharing=False)
        tokens = range(20)
        a, b = (cache.insert(tokens).seq for _ in range(2))
        finish(cache, kv, (a, tokens), (b, tokens))
        assert cache.stats().num_in_use == 4

    def test_more_sequences_than_usual_fit_in_a_step(self) -> None:
        cache, kv = make(capacity=1500)
        prompts = [[i, 1, 2] for i in range(1500)]
        seqs = [cache.insert(tokens).seq for tokens in prompts]
        finish(cache, kv, *zip(seqs, prompts, strict=True))


class TestArrays:
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_torch_in_gives_torch_out(self, dtype: str) -> None:
        kind = getattr(torch, dtype)
        cache = ChunkCache(1, 2, 8, dtype=kind, capacity=4, chunk_size=16)
        seq = cache.insert(range(5)).seq
        q, k, v = torch.randn(3, 5, 2, 8).to(kind)
        with cache.plan([seq], [0, 5]) as plan:
            cache.write_kv(0, k, v, plan)
            out, lse = cache.attend(0, q, plan, return_lse=True)
            cache.commit(plan)
        assert (out.dtype, lse.dtype) == (kind, torch.float32)
        mask = torch.ones(5, 5).tril().bool()
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(part.float().transpose(0, 1) for part in (q, k, v)), attn_mask=mask
        )
        torch.testing.assert_close(out.float(), expected.transpose(0, 1), atol=2e-2, rtol=2e-2)
        for written, read in zip((k, v), cache.read_kv(0, seq, 0, 5), strict=True):
            assert torch.equal(written, read)

    @pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
    def test_what_is_written_is_read(self, dtype) -> None:
        cache = ChunkCache(2, 2, 8, dtype=dtype, capacity=4, chunk_size=16)
        kv = PrefixKv(2, 2, 8, dtype=cache.dtype)
        tokens = range(40)
        seq = cache.insert(tokens).seq
        entries = [pending(cache, seq, tokens)]
        with begin(cache, entries) as plan:
            write(cache, kv, plan, entries)
            cache.commit(plan)
        for layer in range(2):
            k, v = cache.read_kv(layer, seq, 3, 37)
            expected_k, expected_v = kv.keys_values(layer, tokens)
            np.testing.assert_array_equal(k, expected_k[3:37])
            np.testing.assert_array_equal(v, expected_v[3:37])

    def test_outputs_go_where_they_are_wanted(self) -> None:
        cache, kv = make()
        tokens = range(5)
        seq = cache.insert(tokens).seq
        entries = [pending(cache, seq, tokens)]
        q = kv.queries(0, tokens)
        out = np.full((5, 8, 8), 9.0, dtype=np.float32)[:, ::2]
        lse = np.empty((5, 4), dtype=np.float32)
        with begin(cache, entries) as plan:
            write(cache, kv, plan, entries)
            returned = cache.attend(0, q, plan, out=out, lse=lse, return_lse=True)
            assert returned[0] is out
            assert returned[1] is lse
            expected, expected_lse = cache.attend(0, q, plan, return_lse=True)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(lse, expected_lse)
        assert np.all(out.base[:, 1::2] == 9.0)

    def test_lse_is_filled_even_if_it_is_not_returned(self) -> None:
        cache, kv = make()
        seq = cache.insert([1]).seq
        lse = np.full((1, 4), 9.0, dtype=np.float32)
        with cache.plan([seq]) as plan:
            write(cache, kv, plan, [pending(cache, seq, [1])])
            out = cache.attend(0, kv.queries(0, [1]), plan, lse=lse)
        assert isinstance(out, np.ndarray)
        assert np.all(np.isfinite(lse) & (lse != 9.0))

    def test_slices_of_a_fused_projection_are_read_in_place(self) -> None:
        cache, kv = make()
        tokens = range(5)
        seq = cache.insert(tokens).seq
        k, v = kv.keys_values(0, tokens)
        q = kv.queries(0, tokens)
        fused = np.concatenate([q, k, v], axis=1)
        with cache.plan([seq], [0, 5]) as plan:
            cache.write_kv(0, fused[:, 4:6], fused[:, 6:], plan)
            strided = cache.attend(0, fused[:, :4], plan)
            np.testing.assert_array_equal(strided, cache.attend(0, q, plan))


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({}, "capacity"),
            ({"capacity": 4, "capacity_bytes": 10**6}, "capacity"),
            ({"capacity": 0}, "capacity"),
            ({"capacity_bytes": 100}, "capacity_bytes"),
            ({"capacity": 4, "chunk_size": 8}, "chunk_size"),
            ({"capacity": 4, "chunk_size": 24}, "chunk_size"),
            ({"capacity": 4, "chunk_size": 144}, "chunk_size"),
            ({"capacity": 4, "dtype": "float64"}, "dtype"),
            ({"capacity": 4, "device": "tpu"}, "device"),
            ({"capacity": 4, "num_threads": 0}, "num_threads"),
            ({"capacity": 4, "num_layers": 0}, "num_layers"),
            ({"capacity": 4, "num_kv_heads": -1}, "num_kv_heads"),
            ({"capacity": 4, "head_dim": 6}, "head_dim"),
            ({"capacity": 4, "head_dim": 4, "dtype": "float16"}, "head_dim"),
        ],
    )
    def test_a_configuration_is_refused_by_name(self, options, name) -> None:
        sizes = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 8}
        with pytest.raises(InvalidConfigError, match=rf"{name}: got .*allowed is"):
            ChunkCache(**{**sizes, **options})

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"layer": 2}, "layer"),
            ({"layer": -1}, "layer"),
            ({"q": np.zeros((1, 4, 16), np.float32)}, "q"),
            ({"q": np.zeros((2, 4, 8), np.float32)}, "q"),
            ({"q": np.zeros((1, 3, 8), np.float32)}, "q"),
            ({"q": np.zeros((1, 0, 8), np.float32)}, "q"),
            ({"q": np.zeros((1, 4, 8), np.float16)}, "q"),
            ({"q": torch.zeros(1, 4, 8, dtype=torch.float64)}, "q"),
            ({"sm_scale": float("nan")}, "sm_scale"),
            ({"sm_scale": "x"}, "sm_scale"),
            ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
            ({"window_left": -2}, "window_left"),
            ({"window_left": 1.5}, "window_left"),
            ({"sharing": "maybe"}, "sharing"),
            ({"isa": "sse"}, "isa"),
            ({"out": np.zeros((1, 4, 16), np.float32)}, "out"),
            ({"out": np.zeros((1, 4, 8), np.float16)}, "out"),
            ({"lse": np.zeros((1, 4), np.float64)}, "lse"),
            ({"lse": np.zeros((1, 8), np.float32)[:, ::2]}, "lse"),
        ],
    )
    def test_an_argument_of_attend_is_refused_by_name(self, change, name) -> None:
        cache, kv = make()
        seq = cache.insert([1]).seq
        arguments = {"layer": 0, "q": np.zeros((1, 4, 8), np.float32), **change}
        with cache.plan([seq]) as plan:
            write(cache, kv, plan, [pending(cache, seq, [1])])
            with pytest.raises(InvalidConfigError, match=rf"{name}: got .*allowed is"):
                cache.attend(plan=plan, **arguments)

    def test_an_output_must_not_overlap_the_queries(self) -> None:
        cache, kv = make()
        seq = cache.insert([1]).seq
        q = np.zeros((1, 4, 8), np.float32)
        with cache.plan([seq]) as plan:
            write(cache, kv, plan, [pending(cache, seq, [1])])
            with pytest.raises(InvalidConfigError, match="out: got memory that overlaps q"):
                cache.attend(0, q, plan, out=q)

    @pytest.mark.parametrize("name", ["k", "v"])
    def test_rows_of_the_wrong_shape_are_not_written(self, name: str) -> None:
        cache, _ = make()
        seq = cache.insert([1]).seq
        rows = {"k": np.zeros((1, 2, 8), np.float32), "v": np.zeros((1, 2, 8), np.float32)}
        rows[name] = np.zeros((2, 2, 8), np.float32)
        with (
            cache.plan([seq]) as plan,
            pytest.raises(InvalidConfigError, match=rf"{name}: got .*\[1, 2, 8\]"),
        ):
            cache.write_kv(0, plan=plan, **rows)

    def test_a_plan_of_another_cache_is_refused(self) -> None:
        (cache, _), (other, _) = make(), make()
        other_seq = other.insert([1]).seq
        rows = np.zeros((1, 2, 8), np.float32)
        with (
            other.plan([other_seq]) as plan,
            pytest.raises(InvalidConfigError, match="plan: got a plan of something else"),
        ):
            cache.write_kv(0, rows, rows, plan)

    def test_a_plan_of_another_cache_is_not_committed(self) -> None:
        (cache, _), (other, _) = make(), make()
        with other.plan([other.insert([1]).seq]) as plan:
            with pytest.raises(InvalidConfigError, match="plan: got a plan of something else"):
                cache.commit(plan)
            assert plan.is_open

    @pytest.mark.parametrize("plan", [None, 3, "plan"])
    def test_what_is_no_plan_is_refused_by_name(self, plan) -> None:
        cache, _ = make()
        rows = np.zeros((1, 2, 8), np.float32)
        for call in (
            lambda: cache.write_kv(0, rows, rows, plan),
            lambda: cache.attend(0, rows, plan),
            lambda: cache.commit(plan),
        ):
            with pytest.raises(InvalidConfigError, match=r"plan: got .*allowed is a Plan"):
                call()

    def test_a_step_that_was_committed_without_a_write_can_be_shared(self) -> None:
        cache, _ = make()
        with cache.plan([cache.insert(range(20)).seq], [0, 20]) as plan:
            cache.commit(plan)
        assert cache.insert([*range(18), 99]).num_copied_tokens == 2

    def test_nothing_is_read_before_anything_is_written(self) -> None:
        cache, _ = make()
        seq = cache.insert([1]).seq
        with pytest.raises(InvalidConfigError, match="nothing was written"):
            cache.read_kv(0, seq, 0, 1)

    @pytest.mark.parametrize("how", ["commit", "close"])
    def test_a_closed_plan_is_stale(self, how: str) -> None:
        cache, kv = make()
        seq = cache.insert([1]).seq
        plan = cache.plan([seq])
        write(cache, kv, plan, [pending(cache, seq, [1])])
        getattr(plan, how)()
        rows = np.zeros((1, 2, 8), np.float32)
        with pytest.raises(StalePlanError):
            cache.write_kv(0, rows, rows, plan)
        with pytest.raises(StalePlanError):
            cache.attend(0, np.zeros((1, 4, 8), np.float32), plan)
        with pytest.raises(StalePlanError):
            cache.commit(plan)
        plan.close()

    def test_a_plan_behind_an_aborted_one_is_refused(self) -> None:
        cache, _ = make()
        seq = cache.insert(range(4)).seq
        first = cache.plan([seq], [0, 3])
        rows, q = np.zeros((1, 2, 8), np.float32), np.zeros((1, 4, 8), np.float32)
        with cache.plan([seq]) as second:
            cache.write_kv(0, rows, rows, second)
            assert not second.is_stale
            first.close()
            assert second.is_stale
            assert second.is_open
            for call in (
                lambda: cache.write_kv(0, rows, rows, second),
                lambda: cache.attend(0, q, second),
                lambda: cache.commit(second),
            ):
                with pytest.raises(StalePlanError, match="builds on an earlier one"):
                    call()

    def test_a_plan_of_others_goes_on_after_an_abort(self) -> None:
        cache, kv = make()
        aborted, seq = (cache.insert([token] * 5).seq for token in (1, 2))
        first = cache.plan([aborted], [0, 5])
        entry = pending(cache, seq, [2] * 5)
        with begin(cache, [entry]) as second:
            first.close()
            write(cache, kv, second, [entry])
            check_attention(cache, kv, second, [entry])
            cache.commit(second)
        assert cache.sequence(seq).num_computed_tokens == 5

    @pytest.mark.parametrize(
        ("batch", "qo_indptr", "error"),
        [
            ([0, 0], None, InvalidConfigError),
            ([5], None, UnknownSequenceError),
            ([0], [0, 9], InvalidConfigError),
            ([0], [0], InvalidConfigError),
            ([0], [1, 2], InvalidConfigError),
            ([0], [0, -1], InvalidConfigError),
            ([0], "ab", InvalidConfigError),
            (["x"], None, InvalidConfigError),
            (7, None, InvalidConfigError),
        ],
    )
    def test_a_batch_that_cannot_be_planned_changes_nothing(self, batch, qo_indptr, error) -> None:
        cache, kv = make()
        seq = cache.insert(range(5)).seq
        before = cache.sequence(seq)
        batch = [seq if entry == 0 else entry for entry in batch] if batch != 7 else batch
        with pytest.raises(error):
            cache.plan(batch, qo_indptr)
        assert cache.sequence(seq) == before
        finish(cache, kv, (seq, range(5)))

    @pytest.mark.parametrize(("begin", "end"), [(0, 6), (3, 2), (-1, 2), ("a", 2), (0, 1.5)])
    def test_positions_outside_a_sequence_are_not_read(self, begin, end) -> None:
        cache, kv = make()
        seq = cache.insert(range(5)).seq
        finish(cache, kv, (seq, range(5)))
        with pytest.raises(InvalidConfigError, match=r"(begin|end): got .*allowed is"):
            cache.read_kv(0, seq, begin, end)


class TestAccounts:
    def test_bytes_are_counted_by_chunk(self) -> None:
        cache, _ = make()
        assert cache.stats().num_bytes == 0
        cache.insert(range(20))
        assert cache.stats().num_bytes == 2 * (2 * 2 * 2 * 16 * 8 * 4)

    def test_a_capacity_in_bytes_is_rounded_down_to_chunks(self) -> None:
        chunk = 2 * 3 * 2 * 16 * 8 * 2
        cache = ChunkCache(
            3, 2, 8, dtype="float16", chunk_size=16, capacity_bytes=5 * chunk + chunk // 2
        )
        assert cache.capacity == 5

    def test_memory_is_taken_when_it_is_written(self) -> None:
        cache, kv = make()
        assert cache.nbytes == 0
        finish(cache, kv, (cache.insert([1]).seq, [1]))
        assert cache.nbytes > 0


class TestThreads:
    def test_steps_of_several_threads_are_all_right(self) -> None:
        cache, kv = make(capacity=256)
        failures: list[BaseException] = []

        def work(start: int) -> None:
            try:
                for i in range(10):
                    tokens = [*range(20), start, i]
                    seq = cache.insert(tokens, cache_salt=str(start)).seq
                    entry = pending(cache, seq, tokens, str(start))
                    with begin(cache, [entry]) as plan:
                        write(cache, kv, plan, [entry])
                        check_attention(cache, kv, plan, [entry])
                    cache.remove(seq)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        cache.check_invariants()

    def test_other_threads_run_during_attention(self) -> None:
        cache = ChunkCache(1, 8, 64, capacity=8, chunk_size=128, num_threads=1)
        seq = cache.insert(range(1024)).seq
        rows = np.ones((1024, 8, 64), np.float32)
        q = np.ones((1024, 8, 64), np.float32)
        counted, stop = [0], threading.Event()

        def count() -> None:
            while not stop.is_set():
                counted[0] += 1
                time.sleep(0.001)

        thread = threading.Thread(target=count)
        interval = sys.getswitchinterval()
        with cache.plan([seq], [0, 1024]) as plan:
            cache.write_kv(0, rows, rows, plan)
            thread.start()
            # From here on this thread gives up the GIL of its own accord only.
            sys.setswitchinterval(1000)
            try:
                before = counted[0]
                cache.attend(0, q, plan)
                during = counted[0] - before
            finally:
                sys.setswitchinterval(interval)
                stop.set()
                thread.join()
        assert during > 0


#: A program whose system has memory for two chunks, each of which is a slab of 64 MiB.
OUT_OF_MEMORY = """
import resource
from pathlib import Path
import numpy as np
from chunkcache import ChunkCache, InvalidConfigError

cache = ChunkCache(64, 16, 128, chunk_size=64, capacity=8, num_threads=1)
seq = cache.insert([1, 2, 3]).seq
rows = np.ones((3, 16, 128), np.float32)
with cache.plan([seq], [0, 3]) as plan:
    cache.write_kv(0, rows, rows, plan)
    cache.commit(plan)
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (32 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
cache.fork(seq)

before = cache.render(), str(cache.stats())
for operation in (
    lambda: cache.fork(seq),
    lambda: cache.insert([1, 2, 4]),
):
    try:
        operation()
        raise SystemExit("memory out of nothing")
    except InvalidConfigError as error:
        assert str(error).startswith("capacity: got 8 chunks, and no memory"), error
    assert (cache.render(), str(cache.stats())) == before
cache.insert([7, 8])
cache.truncate(seq, 2)
cache.check_invariants()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits its address space as Linux does")
def test_no_memory_for_a_copy_is_an_error_that_changes_nothing() -> None:
    subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], check=True)


def test_reading_past_the_end_of_a_sequence_is_refused() -> None:
    cache = ChunkCache(1, 2, 8, capacity=4, chunk_size=16)
    seq = cache.insert([1, 2]).seq
    with pytest.raises(InvalidConfigError, match=r"end: got 1099511627776, .* 0 to 2"):
        cache.read_kv(0, seq, 0, 2**40)
