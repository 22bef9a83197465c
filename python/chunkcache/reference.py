"""The method of ChunkAttention in plain numpy: a tutorial to read and an oracle to test against.

Everything is computed in float64, one readable step per line of the paper (Ye et al.,
"ChunkAttention: Efficient Self-Attention with Prefix-Aware KV Cache and Two-Phase Partition", ACL
2024, section 3).

The idea in three steps. Softmax attention of a query over n keys can be cut into any pieces of the
keys:

1. `partial_attn` attends to one piece and returns a *partial state* `(o, m, n)`: the weighted sum
   of the values before normalisation, the largest score, and the sum of the exponentials.
2. `attn_reduce` joins two states over disjoint keys into the state over both. It is associative and
   commutative, so pieces may be computed anywhere and joined in any order.
3. `normalise` divides at the end.

Hence the two phases of `two_phase_attention`. *Chunk-first*: a chunk that many sequences share is
read once, with the queries of all of them as one matrix. *Sequence-first*: each sequence goes
through its private chunks and joins them with its rows of the shared results.

Shapes: q `[rows, num_qo_heads, head_dim]`; k and v `[keys, num_kv_heads, head_dim]`, where
num_qo_heads is a multiple of num_kv_heads (grouped-query attention: query head h reads K/V head
`h // (num_qo_heads // num_kv_heads)`). Scores are `sm_scale * q.k`, then, with a `logits_soft_cap`
c > 0, `c * tanh(score / c)`. A query at position i sees the keys at positions j <= i, and with
`window_left` w >= 0 only those with j >= i - w.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from chunkcache import _arrays, _oracle
from chunkcache.errors import InvalidConfigError

Array: TypeAlias = npt.NDArray[np.float64]


class Partial(NamedTuple):
    """A partial attention state over some keys: the paper's `(O, m, n)`.

    `o [rows, num_qo_heads, head_dim]` is not normalised; `m` and `n` are `[rows, num_qo_heads]`.
    The state over no keys is `(0, -inf, 0)`.
    """

    o: Array
    m: Array
    n: Array


class Chunk(NamedTuple):
    """Keys and values `[keys, num_kv_heads, head_dim]`; the first key is at position `start`."""

    k: npt.ArrayLike
    v: npt.ArrayLike
    start: int


class SharedChunk(NamedTuple):
    """The paper's context tuple `(C, i, j)`: chunk C is read by the query rows i <= row < j."""

    chunk: Chunk
    i: int
    j: int


def empty_partial(rows: int, num_qo_heads: int, head_dim: int) -> Partial:
    """Return the state over no keys, the neutral element of `attn_reduce`."""
    rows = _arrays.index("rows", rows, 0, _oracle.MAX_SIZE)
    num_qo_heads = _arrays.index("num_qo_heads", num_qo_heads, 0, _oracle.MAX_SIZE)
    head_dim = _arrays.index("head_dim", head_dim, 0, _oracle.MAX_SIZE)
    o = np.zeros((rows, num_qo_heads, head_dim))
    m = np.full((rows, num_qo_heads), -np.inf)
    n = np.zeros((rows, num_qo_heads))
    return Partial(o, m, n)


def partial_attn(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    visible: npt.NDArray[np.bool_] | None = None,
) -> Partial:
    """Attend with all of q to one chunk of keys (the paper's equation 1).

    Args:
        q: queries `[rows, num_qo_heads, head_dim]`.
        k: keys `[keys, num_kv_heads, head_dim]`.
        v: values, shaped as k.
        sm_scale: factor of the scores, 1/sqrt(head_dim) by default.
        logits_soft_cap: bound of the scores through tanh; None or 0 for none.
        visible: `[rows, keys]`, which keys a row may see; all by default.

    Returns:
        The state over the visible keys of the chunk.

    Raises:
        InvalidConfigError: shapes or numbers that are not allowed.
    """
    queries, keys, values = _oracle.queries_keys_values(q, k, v)
    group = queries.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scale = _oracle.scale(sm_scale, queries.shape[2])
    cap = _oracle.soft_cap(logits_soft_cap)
    seen = _oracle.visible(visible, queries.shape[0], keys.shape[0])

    w = scale * np.einsum("rhd,khd->rhk", queries, keys)
    if cap is not None:
        w = cap * np.tanh(w / cap)
    if seen is not None:
        w = np.where(seen[:, np.newaxis, :], w, -np.inf)
    m = np.max(w, axis=-1, initial=-np.inf)
    e = np.exp(w - _finite(m)[..., np.newaxis])
    n = np.sum(e, axis=-1)
    o = np.einsum("rhk,khd->rhd", e, values)
    return Partial(o, m, n)


def attn_reduce(a: Partial, b: Partial) -> Partial:
    """Join two states over disjoint keys into the state over both (the paper's equation 2)."""
    m = np.maximum(a.m, b.m)
    x = np.exp(a.m - _finite(m))
    y = np.exp(b.m - _finite(m))
    o = x[..., np.newaxis] * a.o + y[..., np.newaxis] * b.o
    n = x * a.n + y * b.n
    return Partial(o, m, n)


def normalise(state: Partial) -> tuple[Array, Array]:
    """Finish a state: the output `o / n` and the natural log-sum-exp `m + log(n)` of the scores.

    Returns:
        `o [rows, num_qo_heads, head_dim]` and `lse [rows, num_qo_heads]`; `(0, -inf)` for a row
        without keys.
    """
    some = state.n > 0
    n = np.where(some, state.n, 1.0)
    lse = np.where(some, state.m + np.log(n), -np.inf)
    return state.o / n[..., np.newaxis], lse


def merge_state(
    o_a: npt.ArrayLike, lse_a: npt.ArrayLike, o_b: npt.ArrayLike, lse_b: npt.ArrayLike
) -> tuple[Array, Array]:
    """Join two finished results over disjoint keys: `attn_reduce` for normalised outputs.

    A finished result `(o, lse)` is the state `(o, m=lse, n=1)`, or `n=0` where there were no keys.

    Raises:
        InvalidConfigError: shapes that are not allowed, or no numbers.
    """
    o = _oracle.floats("o_a", o_a, "rows", "num_qo_heads", "head_dim")
    a_m = _oracle.floats("lse_a", lse_a, *o.shape[:2])
    b_m = _oracle.floats("lse_b", lse_b, *o.shape[:2])
    a = Partial(o, a_m, np.isfinite(a_m).astype(np.float64))
    b = Partial(_oracle.floats("o_b", o_b, *o.shape), b_m, np.isfinite(b_m).astype(np.float64))
    return normalise(attn_reduce(a, b))


def visible_keys(
    q_positions: npt.ArrayLike, k_positions: npt.ArrayLike, window_left: int = -1
) -> npt.NDArray[np.bool_]:
    """Return which keys each query sees, `[rows, keys]`: `i - window_left <= j <= i`.

    A `window_left` of -1 is no window.

    Raises:
        InvalidConfigError: what is no integer, or a window below -1.
    """
    window_left = _arrays.index("window_left", window_left, -1, _oracle.MAX_SIZE)
    i = _oracle.positions("q_positions", q_positions)[:, np.newaxis]
    j = _oracle.positions("k_positions", k_positions)[np.newaxis, :]
    seen: npt.NDArray[np.bool_] = j <= i
    return seen if window_left < 0 else seen & (j >= i - window_left)


def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    q_positions: npt.ArrayLike | None = None,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    window_left: int = -1,
) -> tuple[Array, Array]:
    """Attention of one sequence without any chunks: what every other way must equal.

    Args:
        q: queries `[rows, num_qo_heads, head_dim]`.
        k: all keys of the sequence `[keys, num_kv_heads, head_dim]`.
        v: all values, shaped as k.
        q_positions: token position of each query; the last `rows` positions by default.
        sm_scale: factor of the scores, 1/sqrt(head_dim) by default.
        logits_soft_cap: bound of the scores through tanh; None or 0 for none.
        window_left: how far back a query sees; -1 is without end.

    Returns:
        `o [rows, num_qo_heads, head_dim]` and `lse [rows, num_qo_heads]`.

    Raises:
        InvalidConfigError: shapes or numbers that are not allowed.
    """
    q, k, v = _oracle.queries_keys_values(q, k, v)
    rows, keys = q.shape[0], k.shape[0]
    positions = np.arange(keys - rows, keys)
    if q_positions is not None:
        positions = _oracle.positions("q_positions", q_positions, rows)
    visible = visible_keys(positions, np.arange(keys), window_left)
    return normalise(
        partial_attn(q, k, v, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap, visible=visible)
    )


def two_phase_attention(
    q: npt.ArrayLike,
    q_positions: Sequence[int],
    shared: Sequence[SharedChunk],
    private: Sequence[Sequence[Chunk]],
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    window_left: int = -1,
) -> tuple[Array, Array]:
    """Attention of a batch over a prefix tree in two phases (the paper's algorithms 1 and 2).

    Args:
        q: queries `[rows, num_qo_heads, head_dim]`, one row per sequence (or per query token of a
            sequence), in the depth-first order of the tree, so that every chunk covers a contiguous
            range of rows.
        q_positions: token position of each row.
        shared: the chunks that several rows share, each with its range of rows.
        private: for each row the chunks that it alone reads.
        sm_scale: factor of the scores, 1/sqrt(head_dim) by default.
        logits_soft_cap: bound of the scores through tanh; None or 0 for none.
        window_left: how far back a query sees; -1 is without end.

    Returns:
        `o [rows, num_qo_heads, head_dim]` and `lse [rows, num_qo_heads]`.

    Raises:
        InvalidConfigError: shapes or numbers that are not allowed, or chunks of rows that are not
            there.
    """
    queries = _oracle.floats("q", q, "rows", "num_qo_heads", "head_dim")
    positions = _oracle.positions("q_positions", q_positions, queries.shape[0])
    _check_chunks(shared, private, queries.shape[0])

    def attend(i: int, j: int, chunk: Chunk) -> Partial:
        keys = np.shape(chunk.k)[0]
        visible = visible_keys(positions[i:j], chunk.start + np.arange(keys), window_left)
        return partial_attn(
            queries[i:j],
            chunk.k,
            chunk.v,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            visible=visible,
        )

    # Phase one, chunk-first: K and V of a shared chunk are read once for all its rows.
    saved = [(i, j, attend(i, j, chunk)) for chunk, i, j in shared]

    # Phase two, sequence-first: each row joins its part of the saved states with its own chunks.
    finished = []
    for u in range(queries.shape[0]):
        state = empty_partial(1, *queries.shape[1:])
        for i, j, (o, m, n) in saved:
            if i <= u < j:
                row = slice(u - i, u - i + 1)
                state = attn_reduce(state, Partial(o[row], m[row], n[row]))
        for chunk in private[u]:
            state = attn_reduce(state, attend(u, u + 1, chunk))
        finished.append(normalise(state))
    return np.concatenate([o for o, _ in finished]), np.concatenate([lse for _, lse in finished])


def quantise_fp8(x: npt.ArrayLike, scale: npt.ArrayLike = 1.0) -> npt.NDArray[np.uint8]:
    """Return K or V as a cache in fp8 (e4m3, without infinities) stores them.

    Args:
        x: keys or values `[..., num_kv_heads, head_dim]`.
        scale: of all heads, or `[num_kv_heads]`.

    Returns:
        The bits of x / scale (in float32): a sign, four bits of exponent, three of mantissa. To the
        nearest, ties to even; what is beyond 448 becomes 448, and NaN stays NaN.

    Raises:
        InvalidConfigError: shapes that do not fit each other.
    """
    with np.errstate(all="ignore"):
        wanted = (np.asarray(x, dtype=np.float32) / _per_head(x, scale)).astype(np.float64)
        size = np.minimum(np.abs(wanted), _FP8_VALUES[_FP8_MAX])
        # Steps of a binade are an eighth of it; the smallest binade reaches down to zero.
        exponent = np.clip(np.floor(np.log2(size)), -6, 8)
        step = np.exp2(np.where(np.isnan(exponent), 0, exponent) - 3)
        rounded = np.rint(size / step) * step
    bits = np.searchsorted(_FP8_VALUES[: _FP8_MAX + 1], rounded).astype(np.uint8)
    signed = bits | np.where(np.signbit(wanted), np.uint8(0x80), np.uint8(0))
    return np.where(np.isnan(wanted), np.uint8(0x7F), signed).astype(np.uint8)


def dequantise_fp8(bits: npt.ArrayLike, scale: npt.ArrayLike = 1.0) -> Array:
    """Return what the bits of `quantise_fp8` stand for, in float64.

    Args:
        bits: uint8 `[..., num_kv_heads, head_dim]`.
        scale: of all heads, or `[num_kv_heads]`.

    Raises:
        InvalidConfigError: shapes that do not fit each other, or bits of another dtype.
    """
    codes = np.asarray(bits)
    if codes.dtype != np.uint8:
        raise InvalidConfigError(f"bits: got {codes.dtype}, allowed is uint8")
    values: Array = _FP8_VALUES[codes & 0x7F] * np.where(codes & 0x80, -1.0, 1.0)
    return np.multiply(values, _per_head(codes, scale), dtype=np.float64)


def error(out: npt.ArrayLike, ref: npt.ArrayLike) -> float:
    """Return the largest `max|out - ref| / max|ref|` over rows and heads, the maxima over head_dim.

    A row and head whose reference is all zero must be zero: any other output there counts as
    infinite.
    """
    wanted = np.atleast_1d(_oracle.floats("ref", ref))
    found = np.atleast_1d(_oracle.floats("out", out, *np.shape(ref)))
    difference = np.max(np.abs(found - wanted), axis=-1, initial=0.0)
    size = np.max(np.abs(wanted), axis=-1, initial=0.0)
    with np.errstate(invalid="ignore"):
        ratio = np.where(size > 0, difference / np.where(size > 0, size, 1.0), 0.0)
    ratio = np.where((size == 0) & (difference > 0), np.inf, ratio)
    return float(np.max(ratio, initial=0.0))


def _check_chunks(
    shared: Sequence[SharedChunk], private: Sequence[Sequence[Chunk]], rows: int
) -> None:
    for name, chunks in (("shared", shared), ("private", private)):
        if not isinstance(chunks, (list, tuple)):
            given = _arrays.described(chunks)
            raise InvalidConfigError(f"{name}: got {given}, allowed is a list of chunks")
    for index, entry in enumerate(shared):
        if not isinstance(entry, SharedChunk):
            given = _arrays.described(entry)
            raise InvalidConfigError(f"shared[{index}]: got {given}, allowed is a SharedChunk")
        _check_chunk(f"shared[{index}].chunk", entry.chunk)
        begin = _arrays.index(f"shared[{index}].i", entry.i, 0, rows)
        _arrays.index(f"shared[{index}].j", entry.j, begin, rows)
    if len(private) != rows:
        raise InvalidConfigError(f"private: got {len(private)} lists, allowed is {rows}, one a row")
    for row, own in enumerate(private):
        if not isinstance(own, (list, tuple)):
            given = _arrays.described(own)
            raise InvalidConfigError(f"private[{row}]: got {given}, allowed is a list of chunks")
        for index, chunk in enumerate(own):
            _check_chunk(f"private[{row}][{index}]", chunk)


def _check_chunk(name: str, chunk: Chunk) -> None:
    if not isinstance(chunk, Chunk):
        raise InvalidConfigError(f"{name}: got {_arrays.described(chunk)}, allowed is a Chunk")
    _arrays.index(f"{name}.start", chunk.start, 0, _oracle.MAX_SIZE)


def _fp8_values() -> Array:
    """Return what the bits without a sign stand for."""
    bits = np.arange(0x80)
    exponent, mantissa = bits >> 3, bits & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent - 10.0))
    values[0x7F] = np.nan
    return values


_FP8_VALUES = _fp8_values()
_FP8_MAX = 0x7E


def _per_head(x: npt.ArrayLike, scale: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Return a scale, shaped to be broadcast with `[..., num_kv_heads, head_dim]`."""
    shape, found = np.shape(x), np.asarray(scale, dtype=np.float32)
    if found.ndim == 0:
        return found
    if len(shape) < 2 or found.shape != shape[-2:-1]:
        raise InvalidConfigError(
            f"scale: got shape {list(found.shape)}, allowed is a number or one for each head of"
            f" {list(shape)}"
        )
    return found[:, np.newaxis]


def _finite(m: Array) -> Array:
    """Replace -inf (no keys) by 0, where `-inf - -inf` would be NaN."""
    return np.where(np.isfinite(m), m, 0.0)
