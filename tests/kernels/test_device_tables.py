"""What the device gets to know of a step, on the host: patches, counts, copies, addresses."""

import numpy as np
import pytest

from chunkcache import InvalidConfigError, StalePlanError, UnknownSequenceError
from chunkcache._core import DeviceCache, Plan
from chunkcache.kernels.image import TableState
from chunkcache.kernels.work import DeviceCosts, Heads

SIZES = (2, 64, 2, 16, 64, 2)


def make(address: int = 1 << 40, sizes: tuple[int, ...] = SIZES) -> DeviceCache:
    return DeviceCache(address, sizes, Heads(2, 4, 8).packed(), DeviceCosts().packed(), True)


class Device:
    """A copy of the tables that follows the plans by patches alone."""

    def __init__(self) -> None:
        self.held = (0, 0)
        self.steps = 0

    def sync(self, cache: DeviceCache, plan: Plan) -> int:
        """Stage a plan; returns the words that travel."""
        self.steps += 1
        buffer = np.zeros(cache.max_patch_words(plan), dtype=np.uint32)
        words = cache.stage(plan, self.held, buffer.ctypes.data, len(buffer), self.steps)
        assert words == 0 or buffer[0] == self.steps
        state = TableState.of(cache, plan)
        self.held = (state.image_id, state.version)
        return words


def step(cache: DeviceCache, device: Device, seqs: list[int], count: int | None = None) -> int:
    counts = [count or cache.tree.sequence(seq).num_known_tokens for seq in seqs]
    plan = cache.tree.plan(seqs, [0, *np.cumsum(counts).tolist()])
    words = device.sync(cache, plan)
    cache.commit(plan)
    return words


def test_steps_without_structural_change_send_nothing():
    cache, device = make(), Device()
    seqs = [cache.tree.insert([i, *range(17)]).seq for i in range(3)]
    step(cache, device, seqs)
    before = cache.tree.stats()
    sent = []
    for _ in range(40):
        cache.tree.append_batch(seqs, [1] * 3)
        sent.append(step(cache, device, seqs, 1))
    # The first decoding step has other rows than the prefill; leaves fill at 32 and 48 tokens.
    changed = [i for i, words in enumerate(sent) if words]
    assert changed == [0, 14, 30]
    after = cache.tree.stats()
    assert after.table_copies - before.table_copies == 3
    assert after.table_bytes_copied - before.table_bytes_copied == 4 * sum(sent)


def test_a_step_that_is_planned_again_does_not_advance():
    cache, device = make(), Device()
    seq = cache.tree.insert(range(20)).seq
    step(cache, device, [seq])
    cache.tree.append(seq, 1)
    for _ in range(2):
        plan = cache.tree.plan([seq])
        assert device.sync(cache, plan) > 0
        plan.close()


def test_tables_of_an_earlier_plan_are_sent_whole():
    cache, device = make(), Device()
    seqs = [cache.tree.insert([i, *range(20)]).seq for i in range(2)]
    first, second = cache.tree.plan(seqs[:1], [0, 21]), cache.tree.plan(seqs[1:], [0, 21])
    sent = [device.sync(cache, plan) for plan in (first, second, first)]
    num_words = TableState.of(cache, first).layout.num_words
    # The copy begins as zeros, and most of the tables are zeros still.
    assert sent[0] < 0.01 * num_words
    assert min(sent[1:]) > num_words


def test_a_released_plan_can_be_committed_but_not_used():
    cache, device = make(), Device()
    seq = cache.tree.insert(range(20)).seq
    plan = cache.tree.plan([seq], [0, 20])
    device.sync(cache, plan)
    cache.release(plan)
    with pytest.raises(StalePlanError):
        device.sync(cache, plan)
    cache.commit(plan)
    assert cache.tree.sequence(seq).num_computed_tokens == 20


def test_a_large_step_gets_larger_tables():
    cache = make(sizes=(1, 600, 1, 16, 64, 2))
    seq = cache.tree.insert(range(9000)).seq
    plan = cache.tree.plan([seq], [0, 9000])
    assert TableState.of(cache, plan).layout.max_rows >= 9000


def test_another_number_of_query_heads_is_cut_anew():
    cache = make()
    seq = cache.tree.insert(range(20)).seq
    plan = cache.tree.plan([seq], [0, 20])
    before = TableState.of(cache, plan)
    cache.set_heads(plan, Heads(2, 3, 8).packed())
    after = TableState.of(cache, plan)
    assert (before.num_qo_heads, after.num_qo_heads) == (8, 6)
    assert after.version > before.version
    plan.close()
    again = cache.tree.plan([seq], [0, 20])
    assert TableState.of(cache, again).num_qo_heads == 6


def test_copies_are_told_once_and_in_runs():
    cache, device = make(), Device()
    seq = cache.tree.insert(range(20)).seq
    step(cache, device, [seq])
    forks = [cache.tree.fork(seq).copy for _ in range(2)]
    (run,) = cache.take_copies()
    assert run == [(copy.src_chunk, copy.dst_chunk, 4) for copy in forks]
    assert cache.take_copies() == []


def test_addresses_past_32_bits():
    layers, chunks, heads, size, head_dim = 32, 100_000, 8, 64, 128
    base = 0x7F00_0000_0000
    cache = make(base, (layers, chunks, heads, size, head_dim, 2))
    chunk_bytes = 2 * heads * size * head_dim * 2
    assert cache.nbytes == layers * chunks * chunk_bytes > 2**39
    address, page, head, token = cache.layer(31)
    assert address == base + 31 * chunks * chunk_bytes
    assert (page, head, token) == (chunk_bytes, size * head_dim * 2, head_dim * 2)


@pytest.mark.parametrize("address", [2**64 - 1, 2**64 - 2**50])
def test_an_arena_past_64_bits_is_refused(address: int):
    with pytest.raises(InvalidConfigError, match="arena"):
        make(address, (64, 2**31, 64, 128, 256, 2))


def test_chunks_of_a_sequence():
    cache = make()
    seq = cache.tree.insert(range(40)).seq
    ids = cache.tree.sequence(seq).chunk_ids
    assert cache.chunks_of(seq, 17, 33) == ids[1:3]
    assert cache.chunks_of(seq, 5, 5) == ids[:1]
    with pytest.raises(InvalidConfigError, match="end: got 41"):
        cache.chunks_of(seq, 0, 41)
    with pytest.raises(UnknownSequenceError):
        cache.chunks_of(999, 0, 1)


def test_a_plan_of_another_cache_is_refused():
    first, second = make(), make()
    plan = first.tree.plan([first.tree.insert(range(5)).seq], [0, 5])
    for use in (second.tables, second.commit, second.release):
        with pytest.raises(InvalidConfigError, match="plan"):
            use(plan)


def test_a_large_step_leaves_the_tables_of_the_others_as_they_are():
    cache = make(sizes=(1, 200, 2, 64, 64, 2))
    tree = cache.tree
    seq = tree.insert(range(50)).seq

    def layout_of_a_small_step() -> list[int]:
        with tree.plan([seq], [0, 1]) as plan:
            return cache.tables(plan)[2]

    before = layout_of_a_small_step()
    with tree.plan([tree.insert(range(1000, 7000)).seq], [0, 6000]) as plan:
        assert cache.tables(plan)[2] != before
    assert layout_of_a_small_step() == before
