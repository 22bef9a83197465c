"""ChunkCache: a prefix tree together with the K/V of its chunks, for all layers of a model."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from chunkcache import _arrays, _core
from chunkcache._arrays import Expected, Tensor, view
from chunkcache._core import (
    ForkResult,
    Inherited,
    InsertResult,
    Plan,
    PrefixMatch,
    SequenceInfo,
    Stats,
    TruncateResult,
)
from chunkcache._types import Isa, Sharing, Tokens
from chunkcache.attention import check_plan, outputs
from chunkcache.errors import InvalidConfigError
from chunkcache.kernels import frontend, storage

if TYPE_CHECKING:
    import torch

    from chunkcache.kernels.graphs import CapturedStep


class ChunkCache:
    """The K/V cache of many sequences, in which equal prefixes are stored and read once.

    One prefix tree serves all layers. A step of a model goes::

        with cache.plan(batch, qo_indptr) as plan:
            for layer in range(num_layers):
                cache.write_kv(layer, k, v, plan)
                out = cache.attend(layer, q, plan)
            cache.commit(plan)

    Leaving the block without `commit` aborts the step: nothing counts as written. Every method is
    atomic and may be called from any thread; K/V that an operation has to copy (a prompt that
    diverges inside a chunk, a fork) is copied before it returns.

    Attributes:
        tree: the prefix tree, with all its operations.
        num_layers: layers of the model.
        num_kv_heads: K/V heads of a layer.
        head_dim: elements of one head's key or value.
        dtype: name of the element type.
        device: where K and V lie: "cpu" or "cuda:N".
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: Any = "float32",
        chunk_size: int = 64,
        capacity: int | None = None,
        capacity_bytes: int | None = None,
        num_threads: int | None = None,
        enable_prefix_sharing: bool = True,
        device: Any = "cpu",
        memory_fraction: float | None = None,
        num_qo_heads: int | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        """Make an empty cache.

        Host memory is taken slab by slab as chunks are written, device memory at once.

        Args:
            num_layers: layers of the model.
            num_kv_heads: K/V heads of a layer.
            head_dim: elements of one head's key or value; times the item size a multiple of 16
                bytes.
            dtype: "float32", "float16" or "bfloat16", or that dtype of numpy or torch; not
                "float32" on a CUDA device, which has "float8_e4m3fn" instead (torch's name, or
                "float8_e4m3", "fp8_e4m3", "fp8") from compute capability 8.9 on. With that, queries
                are float16 or bfloat16.
            chunk_size: tokens per chunk, 16 to 128, a multiple of 16. Other engines call a chunk a
                page or a block.
            capacity: chunks in the pool; give this, `capacity_bytes` or `memory_fraction`.
            capacity_bytes: bytes of K and V over all layers, rounded down to chunks.
            num_threads: threads of the kernels; all cores by default. Results do not depend on it.
            enable_prefix_sharing: without it nothing is matched, kept or read together.
            device: "cpu", "cuda" (torch's current device), "cuda:N", a CUDA ordinal or a
                torch.device. A CUDA device needs `chunkcache[torch,cuda]`; `num_threads`, and
                `sharing` and `isa` of `attend`, are for the CPU alone.
            memory_fraction: share of the device's free memory to take, above 0 and up to 1.
            num_qo_heads: query heads of a layer, on a CUDA device: what plans are cut for before
                the first `attend`, which tells it otherwise.
            k_scale: what keys in fp8 are divided by when they are written and multiplied by when
                they are read: a number, or float32 `[num_layers, num_kv_heads]`; 1 by default. A
                head's largest key over 448 is the scale that uses the whole range.
            v_scale: the same for values.

        Raises:
            InvalidConfigError: an argument that is not allowed.
            KernelError: no CUDA driver, or too little device memory.
        """
        self.dtype = _arrays.check_dtype("dtype", dtype)
        ordinal = storage.device_ordinal(device)
        if ordinal is None and self.dtype == _arrays.FP8:
            allowed = " or ".join(_arrays.ITEM_SIZES)
            raise InvalidConfigError(f"dtype: got {self.dtype}, allowed on the CPU is {allowed}")
        sizes = (capacity, capacity_bytes, memory_fraction)
        if sum(size is not None for size in sizes) != 1:
            raise InvalidConfigError(
                f"capacity: got {_arrays.described(capacity)}, capacity_bytes"
                f" {_arrays.described(capacity_bytes)} and memory_fraction"
                f" {_arrays.described(memory_fraction)}, allowed is exactly one of them"
            )
        self._cuda: storage.DeviceStorage | None = None
        #: An empty array of the kind that was last written.
        self._kind: Tensor | None = None
        self.num_layers: int = num_layers
        self.num_kv_heads: int = num_kv_heads
        self.head_dim: int = head_dim
        if ordinal is not None:
            if num_threads is not None:
                given = _arrays.described(num_threads)
                raise InvalidConfigError(
                    f"num_threads: got {given}, allowed on a CUDA device is None"
                )
            shape = storage.KvShape(num_layers, num_kv_heads, head_dim, self.dtype, chunk_size)
            chunks = storage.num_chunks(ordinal, shape, *sizes)
            self._cuda = storage.DeviceStorage(
                ordinal, shape, chunks, num_qo_heads, enable_prefix_sharing, k_scale, v_scale
            )
            self.device = f"cuda:{ordinal}"
            self.tree = self._cuda.host.tree
            return
        for name, only_cuda in (
            ("memory_fraction", memory_fraction),
            ("num_qo_heads", num_qo_heads),
            ("k_scale", k_scale),
            ("v_scale", v_scale),
        ):
            if only_cuda is not None:
                raise InvalidConfigError(
                    f"{name}: got {_arrays.described(only_cuda)}, allowed on the CPU is None"
                )
        self.device = "cpu"
        self._host = _core.HostCache(
            num_layers,
            num_kv_heads,
            head_dim,
            dtype=self.dtype,
            chunk_size=chunk_size,
            capacity=capacity,
            capacity_bytes=capacity_bytes,
            num_threads=num_threads,
            enable_prefix_sharing=enable_prefix_sharing,
        )
        self.tree = self._host.tree

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk."""
        return self.tree.chunk_size

    @property
    def capacity(self) -> int:
        """Chunks in the pool."""
        return self.tree.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of memory taken for K and V so far; `stats()` has those of chunks in use."""
        return self._host.nbytes if self._cuda is None else self._cuda.host.nbytes

    def match_prefix(self, tokens: Tokens, cache_salt: str = "") -> PrefixMatch:
        """Look up how much of a prompt is cached; see `PrefixTree.match_prefix`."""
        return self.tree.match_prefix(tokens, cache_salt)

    def insert(self, tokens: Tokens, cache_salt: str = "") -> InsertResult:
        """Add a sequence; see `PrefixTree.insert`."""
        return self.tree.insert(tokens, cache_salt)

    def append(self, seq: int, tokens: Tokens | SupportsIndex) -> None:
        """Add tokens to a sequence; see `PrefixTree.append`."""
        self.tree.append(seq, tokens)

    def append_batch(self, seqs: Iterable[int], tokens: Tokens) -> None:
        """Add one token to each sequence; see `PrefixTree.append_batch`."""
        self.tree.append_batch(seqs, tokens)

    def reserve(self, seqs: Iterable[int]) -> None:
        """Reserve one slot in each sequence; see `PrefixTree.reserve`."""
        self.tree.reserve(seqs)

    def cancel_reserved(self, seq: int) -> None:
        """Take the youngest reserved slot back; see `PrefixTree.cancel_reserved`."""
        self.tree.cancel_reserved(seq)

    def fork(self, seq: int) -> ForkResult:
        """Make a second sequence of the same tokens; see `PrefixTree.fork`."""
        return self.tree.fork(seq)

    def truncate(self, seq: int, num_tokens: int) -> TruncateResult:
        """Cut a sequence to its first tokens; see `PrefixTree.truncate`."""
        return self.tree.truncate(seq, num_tokens)

    def rewind(self, seq: int, num_computed_tokens: SupportsIndex) -> None:
        """Let the next plan of a sequence begin earlier; see `PrefixTree.rewind`."""
        self.tree.rewind(seq, num_computed_tokens)

    def remove(self, seq: int) -> list[Inherited]:
        """End a sequence; see `PrefixTree.remove`."""
        return self.tree.remove(seq)

    def pin(self, tokens: Tokens, cache_salt: str = "", ttl: float | None = None) -> int:
        """Keep a prompt's written full chunks from eviction; see `PrefixTree.pin`."""
        return self.tree.pin(tokens, cache_salt, ttl)

    def unpin(self, pin: int) -> None:
        """End a pin; see `PrefixTree.unpin`."""
        self.tree.unpin(pin)

    def evict(self, num_chunks: int) -> int:
        """Free chunks that no one uses; see `PrefixTree.evict`."""
        return self.tree.evict(num_chunks)

    def clear(self) -> int:
        """Free all chunks that no one uses; see `PrefixTree.clear`."""
        return self.tree.clear()

    def sequence(self, seq: int) -> SequenceInfo:
        """Return a sequence's state; see `PrefixTree.sequence`."""
        return self.tree.sequence(seq)

    def tokens(self, seq: int) -> npt.NDArray[np.uint32]:
        """Return a sequence's known tokens; see `PrefixTree.tokens`."""
        return self.tree.tokens(seq)

    def stats(self) -> Stats:
        """Return the accounts of the pool and the tree; see `PrefixTree.stats`."""
        return self.tree.stats()

    def check_invariants(self) -> None:
        """Check the tree's numbered invariants; see `PrefixTree.check_invariants`."""
        self.tree.check_invariants()

    def render(self) -> str:
        """Draw the tree as text; see `PrefixTree.render`."""
        return self.tree.render()

    def plan(
        self, batch: Iterable[int | None], qo_indptr: Iterable[SupportsIndex] | None = None
    ) -> Plan:
        """Begin a step; see `PrefixTree.plan`."""
        return self.tree.plan(batch, qo_indptr)

    def write_kv(self, layer: int, k: Tensor, v: Tensor, plan: Plan, *, stream: Any = None) -> None:
        """Write one layer's K and V of a step's tokens.

        A row goes to the slot that `plan.slot_mapping` names for it; rows of slot -1 are skipped.

        Args:
            layer: the layer, from 0.
            k: keys `[rows, num_kv_heads, head_dim]` in any strides of rows and heads: of the
                cache's dtype, numpy or torch on the CPU; or torch tensors on the cache's CUDA
                device, also float32, float16 or bfloat16 for a cache of another dtype.
            v: values, likewise.
            plan: the step.
            stream: a torch stream or a handle, on a CUDA device; torch's current one by default.

        Raises:
            InvalidConfigError: a layer, shape, dtype or device that is not allowed.
            StalePlanError: the plan is closed, or builds on one that was closed without a commit.
        """
        check_plan(plan)
        if self._cuda is not None:
            self._cuda.write_kv(layer, k, v, plan, stream)
            return
        _check_no_stream(stream)
        rows = self._kv_rows(plan.num_rows)
        self._host.write_kv(layer, view("k", k, rows), view("v", v, rows), plan)
        self._kind = k[:0]

    def read_kv(
        self, layer: int, seq: int, begin: int, end: int, *, stream: Any = None
    ) -> tuple[Any, Any]:
        """Read one layer's K and V of the tokens `[begin, end)` of a sequence.

        Args:
            layer: the layer, from 0.
            seq: the sequence.
            begin: first token position.
            end: one past the last, at most the sequence's tokens. What was not written is
                unspecified.
            stream: a torch stream or a handle, on a CUDA device; torch's current one by default.

        Returns:
            New arrays k and v `[end - begin, num_kv_heads, head_dim]` of the cache's dtype, and of
            the kind (numpy or torch) that was last written; torch tensors on a CUDA device. Of a
            cache in fp8 it is what its elements stand for, their scales included, in float32;
            `kv_layer` has the elements themselves.

        Raises:
            InvalidConfigError: a layer or positions that are not allowed, or memory that was never
                written.
            UnknownSequenceError: no such sequence.
        """
        num_tokens = self.tree.sequence(seq).num_tokens
        begin = _arrays.index("begin", begin, 0, num_tokens)
        end = _arrays.index("end", end, begin, num_tokens)
        if self._cuda is not None:
            return self._cuda.read_kv(layer, seq, begin, end, stream)
        _check_no_stream(stream)
        if self._kind is None:
            raise InvalidConfigError(
                "seq: got a sequence of a cache to which nothing was written,"
                " allowed is one with written tokens"
            )
        shape = (end - begin, self.num_kv_heads, self.head_dim)
        k, v = _arrays.empty_like(self._kind, shape), _arrays.empty_like(self._kind, shape)
        rows = self._kv_rows(end - begin)
        self._host.read_kv(layer, seq, begin, view("k", k, rows), view("v", v, rows))
        return k, v

    def attend(
        self,
        layer: int,
        q: Tensor,
        plan: Plan,
        *,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        window_left: int = -1,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        sharing: Sharing = "auto",
        isa: Isa | None = None,
        stream: Any = None,
    ) -> Any:
        """Attention of a step's queries to the keys of their sequences, in two phases.

        Scores are `sm_scale * q.k`, then `logits_soft_cap * tanh(score / logits_soft_cap)`. A query
        at position i sees the keys at `i - window_left <= j <= i`. Equal inputs and equal plans
        give equal bits, whatever the number of threads.

        Args:
            layer: the layer, from 0.
            q: queries `[rows, num_qo_heads, head_dim]` of the cache's dtype (float16 or bfloat16
                for a cache in fp8), numpy or torch on the
                CPU, or torch on the cache's CUDA device, in any strides of rows and heads;
                num_qo_heads is a multiple of num_kv_heads.
            plan: the step.
            sm_scale: factor of the scores; 1/sqrt(head_dim) by default.
            logits_soft_cap: bound of the scores; None or 0 for none.
            window_left: how many keys before its own a query sees; -1 is all. A Hugging Face window
                W is W - 1.
            out: where the output goes, shaped as q; a new array by default.
            lse: where the log-sum-exp goes, contiguous float32 `[rows, num_qo_heads]`.
            return_lse: whether to return it too.
            sharing: which shared segments are read once for all their sequences: those for which
                the cost model says that it pays, "always" or "never".
            isa: the instruction set of the kernels; the best that the processor has by default.
            stream: a torch stream or a handle, on a CUDA device; torch's current one by default.

        Returns:
            out, of q's dtype and kind; with `return_lse`, out and lse: the natural logarithm of the
            sum of the exponentials of the scores, float32 `[rows, num_qo_heads]`. Padding gives 0
            and -inf.

        Raises:
            InvalidConfigError: an argument that is not allowed.
            StalePlanError: the plan is closed, or builds on one that was closed without a commit.
        """
        check_plan(plan)
        if self._cuda is not None:
            if sharing != "auto" or isa is not None:
                raise InvalidConfigError(
                    f"sharing, isa: got {sharing!r} and {isa!r}, allowed on a CUDA device is their"
                    " default"
                )
            how = frontend.Options(sm_scale, logits_soft_cap, window_left, return_lse)
            return self._cuda.attend(layer, q, plan, how, out, lse, stream)
        _check_no_stream(stream)
        queries = Expected(
            ("rows", "num_qo_heads", "head_dim"),
            (plan.num_rows, None, self.head_dim),
            (self.dtype,),
        )
        arrays = outputs(q, queries, out, lse, return_lse)
        options = (sm_scale, logits_soft_cap, window_left, sharing, isa)
        self._host.attend(layer, arrays.q, plan, options, arrays.out, arrays.lse)
        return arrays.result()

    def commit(self, plan: Plan) -> list[Inherited]:
        """Count a step's tokens as written, and close its plan; see `Plan.commit`.

        Args:
            plan: the step, after its last layer.

        Returns:
            Who must now write what sequences that were removed meanwhile had begun.

        Raises:
            StalePlanError: the plan is closed, or builds on one that was closed without a commit.
            InvalidConfigError: an earlier plan is still open, or it is not a plan of this cache.
        """
        check_plan(plan)
        host = self._host if self._cuda is None else self._cuda.host
        return host.commit(plan).inherited

    def kv_layer(self, layer: int) -> "torch.Tensor":
        """Return one layer's K and V on a CUDA device, without a copy.

        It is an HND paged tensor as FlashInfer has it,
        `[chunks, 2, num_kv_heads, chunk_size, head_dim]`,
        as of all that was submitted before. Work on other streams than torch's current one has to
        wait for that itself.

        Args:
            layer: the layer, from 0.

        Raises:
            InvalidConfigError: no such layer, or a cache on the CPU.
        """
        return self._on_cuda("kv_layer").kv_layer(layer)

    def capture(self, plan: Plan) -> "CapturedStep":
        """Record a step on a CUDA device as a CUDA graph, to be replayed for plans to come.

        Args:
            plan: an open plan of as many rows as the largest that the graph is to serve. Nothing
                is computed for it before it is replayed.

        Returns:
            A context manager whose block submits the step, and whose `replay(plan)` runs it.

        Raises:
            InvalidConfigError: a cache on the CPU, or a plan of something else.
            StalePlanError: the plan is closed.
        """
        from chunkcache.kernels.graphs import CapturedStep

        check_plan(plan)
        return CapturedStep(self._on_cuda("capture"), plan)

    def _on_cuda(self, operation: str) -> storage.DeviceStorage:
        if self._cuda is None:
            raise InvalidConfigError(f"device: got 'cpu', allowed for {operation} is a CUDA device")
        return self._cuda

    def _kv_rows(self, rows: int) -> Expected:
        sizes = (rows, self.num_kv_heads, self.head_dim)
        return Expected(("rows", "num_kv_heads", "head_dim"), sizes, (self.dtype,))

    def __repr__(self) -> str:
        """Return the sizes of the cache."""
        return (
            f"ChunkCache(num_layers={self.num_layers}, num_kv_heads={self.num_kv_heads},"
            f" head_dim={self.head_dim}, dtype={self.dtype!r}, chunk_size={self.chunk_size},"
            f" capacity={self.capacity}, device={self.device!r})"
        )


def _check_no_stream(stream: Any) -> None:
    if stream is not None:
        raise InvalidConfigError(f"stream: got {stream!r}, allowed on the CPU is None")
