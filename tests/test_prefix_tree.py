"""The tree without K/V: the rules that a scheduler relies on."""

import threading

import numpy as np
import pytest
import torch

from chunkcache import (
    InvalidConfigError,
    OutOfChunksError,
    PrefixTree,
    UnknownSequenceError,
)


def write(tree: PrefixTree, *seqs: int) -> None:
    """Commit all that is left to compute of some sequences, one after another."""
    for seq in seqs:
        info = tree.sequence(seq)
        if info.num_known_tokens > info.num_computed_tokens:
            tree.commit([seq], [info.num_known_tokens - info.num_computed_tokens])


def accounts(tree: PrefixTree) -> tuple:
    stats = tree.stats()
    return stats.num_free, stats.num_evictable, stats.num_in_use


def snapshot(tree: PrefixTree, *seqs: int) -> tuple:
    """All that a failed operation must leave as it was."""
    return (
        accounts(tree),
        [(tree.sequence(seq), list(tree.tokens(seq))) for seq in seqs],
        tree.render(),
    )


class TestWhollyCachedPrompt:
    @pytest.mark.parametrize("length", [8, 9, 11])
    def test_one_token_is_left_to_compute(self, length: int) -> None:
        tree = PrefixTree(16, chunk_size=4)
        first = tree.insert(range(length))
        write(tree, first.seq)
        second = tree.insert(range(length))
        assert second.cached_tokens == length
        assert second.num_computed_tokens == length - 1

    def test_its_full_chunks_are_the_same(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        first = tree.insert(range(8))
        write(tree, first.seq)
        second = tree.insert(range(8))
        assert tree.sequence(second.seq).chunk_ids == tree.sequence(first.seq).chunk_ids

    def test_nothing_of_it_is_written_into_a_shared_chunk(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        first = tree.insert(range(8))
        write(tree, first.seq)
        second = tree.insert(range(8))
        with tree.plan([second.seq]) as plan:
            assert plan.slot_mapping.tolist() == [-1]
            assert plan.positions.tolist() == [7]


class TestEqualPromptsTogether:
    @pytest.mark.parametrize("count", [2, 50])
    def test_common_full_chunks_are_stored_once(self, count: int) -> None:
        tree = PrefixTree(256, chunk_size=4)
        results = [tree.insert(range(10)) for _ in range(count)]
        chunks = [tree.sequence(r.seq).chunk_ids for r in results]
        assert len({tuple(ids[:2]) for ids in chunks}) == 1
        assert len({ids[2] for ids in chunks}) == count
        assert tree.stats().num_in_use == 2 + count

    @pytest.mark.parametrize("count", [2, 50])
    def test_common_full_chunks_are_computed_once(self, count: int) -> None:
        tree = PrefixTree(256, chunk_size=4)
        results = [tree.insert(range(10)) for _ in range(count)]
        assert [r.num_computed_tokens for r in results] == [0] + [8] * (count - 1)

    def test_a_sharer_is_ready_only_when_the_writer_has_written(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a, b = (tree.insert(range(10)).seq for _ in range(2))
        assert not tree.sequence(b).is_ready
        tree.commit([a], [8])
        assert tree.sequence(b).is_ready

    def test_the_oldest_sharer_inherits_when_the_writer_leaves(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a, b, c = (tree.insert(range(10)).seq for _ in range(3))
        tree.commit([a], [6])
        (inherited,) = tree.remove(a)
        assert (inherited.seq, inherited.begin, inherited.end) == (b, 6, 8)
        assert tree.sequence(b).num_computed_tokens <= 6
        assert tree.sequence(c).num_computed_tokens == 8
        tree.check_invariants()

    def test_unwritten_chunks_without_a_sharer_are_freed(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a = tree.insert(range(10)).seq
        assert tree.remove(a) == []
        assert accounts(tree) == (16, 0, 0)


class TestAccounts:
    def test_a_shared_chunk_counts_once(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a = tree.insert(range(8)).seq
        write(tree, a)
        tree.insert(range(8))
        assert accounts(tree) == (14, 0, 2)

    def test_remove_keeps_full_written_chunks_and_frees_the_partial_leaf(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a = tree.insert(range(10)).seq
        write(tree, a)
        tree.remove(a)
        assert accounts(tree) == (14, 2, 0)
        assert tree.match_prefix(range(10)).num_filled == 8

    def test_hits_are_counted_in_tokens(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a = tree.insert(range(10)).seq
        write(tree, a)
        tree.insert([*range(8), 99])
        stats = tree.stats()
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (19, 8)

    def test_sharing_is_measured_over_what_is_live(self) -> None:
        tree = PrefixTree(64, chunk_size=4)
        seqs = [tree.insert([*range(12), 100 + i]).seq for i in range(4)]
        write(tree, *seqs)
        stats = tree.stats()
        assert stats.logical_tokens == 4 * 13
        assert stats.physical_tokens == 12 + 4
        assert stats.capacity_multiplier == pytest.approx(52 / 16)


class TestHandles:
    def test_a_second_remove_is_an_error_that_changes_nothing(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a, b = (tree.insert(range(n)).seq for n in (6, 9))
        write(tree, a, b)
        tree.remove(a)
        before = snapshot(tree, b)
        with pytest.raises(UnknownSequenceError, match=f"seq.*{a}"):
            tree.remove(a)
        assert snapshot(tree, b) == before

    @pytest.mark.parametrize("bad", [-1, 2**64, "a", 1.5, None])
    def test_what_is_no_handle_is_refused_by_name(self, bad) -> None:
        with pytest.raises(InvalidConfigError, match=r"seq: got .*, allowed is a handle"):
            PrefixTree(4).remove(bad)


class TestCommit:
    @pytest.mark.parametrize(
        ("seqs", "num_tokens", "name"),
        [
            ([0, 0], [1, 1], r"seqs\[1\]"),
            ([0], [6], r"num_tokens\[0\]"),
            ([0], [0], r"num_tokens\[0\]"),
            ([0], [-1], r"num_tokens\[0\]"),
            ([0], [1, 2], "num_tokens"),
            (0, [1], "seqs"),
            ([0], 1, "num_tokens"),
        ],
    )
    def test_what_cannot_be_written_is_refused_by_name(self, seqs, num_tokens, name) -> None:
        tree = PrefixTree(8, chunk_size=4)
        seq = tree.insert(range(5)).seq
        before = snapshot(tree, seq)
        seqs = [seq] * len(seqs) if seqs else seqs
        with pytest.raises(InvalidConfigError, match=rf"{name}: got .*, allowed is"):
            tree.commit(seqs, num_tokens)
        assert snapshot(tree, seq) == before

    def test_a_sharer_cannot_be_written_before_what_it_shares(self) -> None:
        tree = PrefixTree(8, chunk_size=4)
        _writer, sharer = (tree.insert(range(6)).seq for _ in range(2))
        with pytest.raises(InvalidConfigError, match=r"seqs\[0\]: got .* are not written"):
            tree.commit([sharer], [2])


class TestEviction:
    def test_the_least_recently_used_leaf_goes_first(self) -> None:
        tree = PrefixTree(8, chunk_size=4)
        for start in (0, 100):
            seq = tree.insert(range(start, start + 8)).seq
            write(tree, seq)
            tree.remove(seq)
        assert tree.evict(1) == 1
        assert tree.match_prefix(range(8)).num_tokens == 4
        assert tree.match_prefix(range(100, 108)).num_tokens == 8

    def test_live_chunks_and_their_ancestors_stay(self) -> None:
        tree = PrefixTree(8, chunk_size=4)
        a = tree.insert(range(10)).seq
        write(tree, a)
        assert tree.evict(8) == 0
        assert tree.sequence(a).num_tokens == 10

    def test_pinned_chunks_stay_until_unpinned(self) -> None:
        tree = PrefixTree(8, chunk_size=4)
        a = tree.insert(range(8)).seq
        write(tree, a)
        pin = tree.pin(range(8))
        tree.remove(a)
        assert tree.stats().num_pinned == 2
        assert tree.evict(8) == 0
        tree.unpin(pin)
        assert tree.evict(8) == 2

    def test_a_pin_ends_with_its_time_to_live(self) -> None:
        tree = PrefixTree(8, chunk_size=4)
        a = tree.insert(range(8)).seq
        write(tree, a)
        tree.pin(range(8), ttl=0.0)
        tree.remove(a)
        assert tree.evict(8) == 2

    def test_a_second_unpin_is_an_error(self) -> None:
        tree = PrefixTree(8, chunk_size=4)
        write(tree, tree.insert(range(8)).seq)
        pin = tree.pin(range(8))
        tree.unpin(pin)
        with pytest.raises(InvalidConfigError, match="pin"):
            tree.unpin(pin)

    def test_chunks_of_a_plan_in_flight_stay_until_it_is_closed(self) -> None:
        tree = PrefixTree(8, chunk_size=4)
        a = tree.insert(range(9)).seq
        tree.commit([a], [8])
        plan = tree.plan([a])
        tree.remove(a)
        assert tree.evict(8) == 0
        plan.close()
        assert tree.evict(8) == 2

    def test_clear_frees_all_that_no_one_uses(self) -> None:
        tree = PrefixTree(8, chunk_size=4)
        a = tree.insert(range(8)).seq
        write(tree, a)
        tree.remove(a)
        b = tree.insert([1, 2]).seq
        tree.clear()
        assert accounts(tree) == (7, 0, 1)
        assert list(tree.tokens(b)) == [1, 2]


class TestExhaustedPool:
    def test_a_prompt_that_can_never_fit_is_refused_with_the_sizes(self) -> None:
        tree = PrefixTree(3, chunk_size=4)
        with pytest.raises(OutOfChunksError, match="4 needed") as caught:
            tree.insert(range(13))
        error = caught.value
        assert (error.needed, error.free, error.evictable) == (4, 3, 0)
        assert accounts(tree) == (3, 0, 0)

    def test_a_batch_append_changes_nothing_and_the_others_go_on(self) -> None:
        tree = PrefixTree(4, chunk_size=4)
        full = [tree.insert(range(10 * i, 10 * i + 4)).seq for i in range(3)]
        partial = tree.insert([77]).seq
        before = snapshot(tree, *full, partial)
        with pytest.raises(OutOfChunksError):
            tree.append_batch([partial, *full], [1, 2, 3, 4])
        assert snapshot(tree, *full, partial) == before
        tree.append_batch([partial], [1])
        assert list(tree.tokens(partial)) == [77, 1]

    def test_evictable_chunks_are_taken(self) -> None:
        tree = PrefixTree(3, chunk_size=4)
        a = tree.insert(range(12)).seq
        write(tree, a)
        tree.remove(a)
        b = tree.insert(range(50, 62)).seq
        assert tree.sequence(b).num_tokens == 12
        assert tree.stats().num_evicted == 3


class TestForkAndTruncate:
    def test_after_a_fork_neither_sees_the_others_tokens(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a = tree.insert(range(6)).seq
        write(tree, a)
        b = tree.fork(a).seq
        tree.append(a, [10, 11])
        tree.append(b, [20])
        assert list(tree.tokens(a)) == [*range(6), 10, 11]
        assert list(tree.tokens(b)) == [*range(6), 20]

    def test_a_fork_shares_full_chunks_and_copies_the_leaf(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a = tree.insert(range(6)).seq
        write(tree, a)
        fork = tree.fork(a)
        ids_a, ids_b = (tree.sequence(s).chunk_ids for s in (a, fork.seq))
        assert ids_a[0] == ids_b[0]
        copy = fork.copy
        assert (copy.src_chunk, copy.dst_chunk, copy.num_tokens) == (ids_a[1], ids_b[1], 2)

    def test_a_fork_of_an_unwritten_leaf_waits_for_the_commit(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a = tree.insert(range(6)).seq
        fork = tree.fork(a)
        assert (fork.waiting, fork.copy) == (True, None)
        committed = tree.commit([a], [6])
        (copy,) = committed.copies
        assert copy.dst_chunk == tree.sequence(fork.seq).chunk_ids[1]
        assert not tree.sequence(fork.seq).is_waiting

    def test_truncate_into_a_shared_chunk_copies(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a = tree.insert(range(8)).seq
        write(tree, a)
        b = tree.insert(range(8)).seq
        shared = tree.sequence(a).chunk_ids
        cut = tree.truncate(b, 6)
        assert cut.copy.src_chunk == shared[1]
        assert cut.copy.num_tokens == 2
        assert list(tree.tokens(a)) == list(range(8))
        assert tree.sequence(a).chunk_ids == shared
        assert list(tree.tokens(b)) == list(range(6))


class TestReservedSlots:
    def test_a_reserved_slot_is_matched_by_no_one_until_its_token_is_known(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a = tree.insert([1, 2, 3]).seq
        tree.reserve([a])
        assert tree.match_prefix([1, 2, 3, 0]).num_tokens == 0
        tree.append(a, 4)
        assert tree.match_prefix([1, 2, 3, 4]).num_tokens == 4

    def test_append_fills_reserved_slots_first(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a = tree.insert([1]).seq
        tree.reserve([a])
        assert (tree.sequence(a).num_tokens, tree.sequence(a).num_known_tokens) == (2, 1)
        tree.append(a, [2, 3])
        assert (tree.sequence(a).num_tokens, tree.sequence(a).num_known_tokens) == (3, 3)

    def test_cancel_takes_a_reserved_slot_back(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a = tree.insert([1]).seq
        before = snapshot(tree, a)
        tree.reserve([a])
        tree.cancel_reserved(a)
        assert snapshot(tree, a) == before

    def test_cancel_without_a_reserved_slot_is_an_error(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        a = tree.insert([1]).seq
        with pytest.raises(InvalidConfigError, match="seq"):
            tree.cancel_reserved(a)


class TestNamespaces:
    def test_two_salts_never_hit_each_other(self) -> None:
        tree = PrefixTree(16, chunk_size=4)
        write(tree, tree.insert(range(8), cache_salt="tenant").seq)
        assert tree.match_prefix(range(8)).num_tokens == 0
        assert tree.match_prefix(range(8), cache_salt="other").num_tokens == 0
        assert tree.match_prefix(range(8), cache_salt="tenant").num_tokens == 8

    def test_a_salt_and_tokens_do_not_run_together(self) -> None:
        tree = PrefixTree(16, chunk_size=1)
        write(tree, tree.insert([ord(c) for c in "bc"], cache_salt="a").seq)
        assert tree.match_prefix([ord("c")], cache_salt="ab").num_tokens == 0

    @pytest.mark.parametrize("salt", [1, None, b"a", "\ud800"])
    def test_a_salt_is_text(self, salt) -> None:
        with pytest.raises(InvalidConfigError, match=r"cache_salt: got .*, allowed is a str"):
            PrefixTree(4).insert([1], cache_salt=salt)


class TestTokens:
    @pytest.mark.parametrize("token", [0, 2**32 - 1])
    def test_the_extreme_ids_work(self, token: int) -> None:
        tree = PrefixTree(4, chunk_size=1)
        seq = tree.insert([token]).seq
        assert list(tree.tokens(seq)) == [token]

    @pytest.mark.parametrize("make", [list, np.array], ids=["list", "array"])
    @pytest.mark.parametrize("token", [-1, 2**32])
    def test_ids_out_of_range_are_refused_by_position(self, token: int, make) -> None:
        tree = PrefixTree(4, chunk_size=1)
        with pytest.raises(
            InvalidConfigError, match=rf"tokens\[1\]: got {token}, allowed is .*4294967295"
        ):
            tree.insert(make([5, token]))
        assert accounts(tree) == (4, 0, 0)

    def test_ids_equal_in_their_low_byte_differ(self) -> None:
        tree = PrefixTree(4, chunk_size=1)
        tree.insert([65])
        assert tree.match_prefix([321]).num_tokens == 0

    @pytest.mark.parametrize("dtype", ["u4", "i4", "i8", "u8", "u2", "i1", ">u4", ">i8"])
    def test_integer_arrays_of_any_kind_are_taken(self, dtype: str) -> None:
        tree = PrefixTree(8, chunk_size=4)
        seq = tree.insert(np.arange(6).astype(dtype)).seq
        assert list(tree.tokens(seq)) == list(range(6))

    @pytest.mark.parametrize("dtype", ["u4", "i4", "i8"])
    def test_strided_arrays_are_taken(self, dtype: str) -> None:
        tree = PrefixTree(8, chunk_size=4)
        seq = tree.insert(np.arange(12).astype(dtype)[::-2]).seq
        assert list(tree.tokens(seq)) == [11, 9, 7, 5, 3, 1]

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
    def test_tensors_of_integers_are_taken(self, dtype: torch.dtype) -> None:
        tree = PrefixTree(8, chunk_size=4)
        seq = tree.insert(torch.arange(6, dtype=dtype)).seq
        assert list(tree.tokens(seq)) == list(range(6))

    @pytest.mark.parametrize("token", [7, np.int64(7), np.array(7), torch.tensor(7)])
    def test_one_token_may_be_any_integer(self, token) -> None:
        tree = PrefixTree(8, chunk_size=4)
        seq = tree.insert([1]).seq
        tree.append(seq, token)
        assert list(tree.tokens(seq)) == [1, 7]

    @pytest.mark.parametrize(
        "bad",
        [
            torch.zeros(3),
            torch.zeros((2, 2), dtype=torch.int64),
            torch.zeros(3, dtype=torch.int64, device="meta"),
            "text",
            3,
            None,
            [1.0],
            ["a"],
            np.zeros(3),
            np.zeros((2, 2), dtype=np.uint32),
            [[1]],
            {"a": 1},
        ],
    )
    def test_what_is_no_sequence_of_integers_is_refused_by_name(self, bad) -> None:
        with pytest.raises(InvalidConfigError, match=r"tokens.*: got .*, allowed is"):
            PrefixTree(4).insert(bad)

    @pytest.mark.parametrize("empty", [[], np.zeros(0, dtype=np.uint32), np.zeros(0, np.int64)])
    def test_an_empty_prompt_is_refused(self, empty) -> None:
        with pytest.raises(InvalidConfigError, match="tokens"):
            PrefixTree(4).insert(empty)


class TestConstruction:
    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            ({"capacity": 0}, "capacity"),
            ({"capacity": -1}, "capacity"),
            ({"capacity": 2**32}, "capacity"),
            ({"capacity": 2**70}, "capacity"),
            ({"capacity": "8"}, "capacity"),
            ({"capacity": 8, "chunk_size": 0}, "chunk_size"),
            ({"capacity": 8, "chunk_size": -4}, "chunk_size"),
            ({"capacity": 8, "chunk_size": 1.5}, "chunk_size"),
            ({"capacity": 8, "enable_prefix_sharing": 1}, "enable_prefix_sharing"),
        ],
    )
    def test_sizes_that_are_not_allowed_are_refused_by_name(self, arguments, name) -> None:
        with pytest.raises(InvalidConfigError, match=f"{name}: got .*, allowed is"):
            PrefixTree(**arguments)

    def test_the_largest_pool_can_be_planned(self) -> None:
        tree = PrefixTree(2**32 - 2)
        with tree.plan([tree.insert([1]).seq]) as plan:
            assert plan.positions.tolist() == [0]

    @pytest.mark.parametrize("chunk_size", [1, 7, 1000])
    def test_any_chunk_size_works_without_kv(self, chunk_size: int) -> None:
        tree = PrefixTree(8, chunk_size=chunk_size)
        tree.insert(range(3))
        assert (tree.chunk_size, tree.capacity) == (chunk_size, 8)

    def test_without_sharing_nothing_is_matched_or_kept(self) -> None:
        tree = PrefixTree(8, chunk_size=4, enable_prefix_sharing=False)
        a = tree.insert(range(8)).seq
        write(tree, a)
        b = tree.insert(range(8))
        assert b.cached_tokens == 0
        tree.remove(a)
        assert accounts(tree) == (6, 0, 2)


class TestSize:
    def test_a_chain_of_a_million_chunks_inserts_matches_and_drops(self) -> None:
        tree = PrefixTree(1_000_000, chunk_size=1)
        tokens = np.arange(1_000_000, dtype=np.uint32)
        seq = tree.insert(tokens).seq
        tree.commit([seq], [1_000_000])
        assert tree.match_prefix(tokens).num_filled == 1_000_000
        tree.remove(seq)
        assert tree.evict(1_000_000) == 1_000_000
        del tree


class TestThreads:
    def test_two_threads_may_use_one_tree(self) -> None:
        tree = PrefixTree(4096, chunk_size=4)
        failures: list[BaseException] = []

        def work(salt: str) -> None:
            try:
                for i in range(200):
                    seq = tree.insert([*range(40), i], cache_salt=salt).seq
                    write(tree, seq)
                    tree.append(seq, [1, 2, 3])
                    tree.remove(seq)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(salt,)) for salt in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        tree.check_invariants()


class WrongLength:
    def __len__(self) -> int:
        return 10**15

    def __iter__(self):
        return iter([1])


@pytest.mark.parametrize("tokens", [range(2**62), WrongLength()])
def test_more_tokens_than_ids_is_refused_at_once(tokens) -> None:
    with pytest.raises(InvalidConfigError, match=r"^tokens: got .* integers, allowed is at most"):
        PrefixTree(10, 4).insert(tokens)


def test_closing_a_plan_tells_who_inherits() -> None:
    tree = PrefixTree(10, 4)
    first, second = (tree.insert(range(9)).seq for _ in range(2))
    plan = tree.plan([first], [0, 4])
    assert tree.remove(first) == []
    (heir,) = plan.close()
    assert (heir.seq, heir.begin, heir.end) == (second, 0, 8)
