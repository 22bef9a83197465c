import hypothesis.strategies as st
from hypothesis.stateful import initialize, precondition, rule

from chunkcache import ChunkCache, Plan, PrefixTree
from chunkcache_testing.devices import NEEDS_CUDA, NumpyCudaCache
from chunkcache_testing.machine import TreeMachine
from chunkcache_testing.prefix_kv import Entry, PrefixKv, check_attention, write


class PrefixTreeMachine(TreeMachine):
    """A bare tree: steps may also be declared as written without a plan."""

    @initialize(chunk_size=st.integers(1, 4), capacity=st.integers(3, 24))
    def make(self, chunk_size: int, capacity: int) -> None:
        self.chunk_size = chunk_size
        self.tree = PrefixTree(capacity, chunk_size=chunk_size)

    @precondition(lambda self: not self.model.steps and self.ready())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        seqs = self.choose_some(data, self.ready())
        counts = [
            data.draw(st.integers(1, self.num_left(seq, self.model.live[seq]))) for seq in seqs
        ]
        before = [self.tree.sequence(seq).num_computed_tokens for seq in seqs]
        self.tree.commit(seqs, counts)
        for seq, start, count in zip(seqs, before, counts, strict=True):
            assert self.tree.sequence(seq).num_computed_tokens == start + count


class ChunkCacheMachine(TreeMachine):
    """A cache: the attention of every step is that of the sequences' own tokens.

    K and V of a token depend on all tokens before it, so that a chunk that is shared, copied,
    reused or not written when it should be shows as a wrong output.
    """

    chunk_size = 16

    @initialize(capacity=st.integers(3, 12))
    def make(self, capacity: int) -> None:
        self.tree = ChunkCache(1, 1, 8, capacity=capacity, chunk_size=16, num_threads=1)
        self.kv = PrefixKv(1, 1, 8)

    def new_tokens(self, data: st.DataObject) -> list[int]:
        # Chunks of a cache are 16 tokens or more, so that runs of a token must fill them.
        lengths = data.draw(st.lists(st.sampled_from([1, 5, 16]), min_size=1, max_size=3))
        return [token for n in lengths for token in [data.draw(st.integers(0, 1))] * n]

    def begun(self, plan: Plan, seqs: list[int], starts: list[int], counts: list[int]) -> None:
        entries = [
            Entry(seq, known.tokens, start, count, known.salt)
            for seq, start, count in zip(seqs, starts, counts, strict=True)
            for known in [self.model.live[seq]]
        ]
        write(self.tree, self.kv, plan, entries)
        check_attention(self.tree, self.kv, plan, entries)


class CudaCacheMachine(ChunkCacheMachine):
    """The same on a CUDA device."""

    @initialize(capacity=st.integers(3, 12))
    def make(self, capacity: int) -> None:
        self.tree = NumpyCudaCache(1, 1, 64, dtype="float16", capacity=capacity, chunk_size=16)
        self.kv = PrefixKv(1, 1, 64, dtype="float16")


TestPrefixTree = PrefixTreeMachine.TestCase
TestChunkCache = ChunkCacheMachine.TestCase


@NEEDS_CUDA
class TestCudaCache(CudaCacheMachine.TestCase):
    pass
