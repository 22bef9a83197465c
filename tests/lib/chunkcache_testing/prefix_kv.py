"""K, V and queries that depend on a token and on all tokens before it, so that any mix-up shows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from chunkcache import ChunkCache, Plan, reference

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

#: The largest error that DESIGN allows, by dtype, as `reference.error` measures it.
TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-2}

_MASK = 2**64 - 1


def _mix(h: int, word: int) -> int:
    """One step of a chain hash (the multiplier of Knuth's MMIX generator)."""
    h = ((h ^ word) * 6364136223846793005 + 1442695040888963407) & _MASK
    return h ^ (h >> 29)


class PrefixKv:
    """Rows for every prefix of every sequence of a namespace, per layer."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_qo_heads: int | None = None,
        dtype: str = "float32",
    ) -> None:
        self.num_layers = num_layers
        self.kv_shape = (num_kv_heads, head_dim)
        self.q_shape = (num_qo_heads or num_kv_heads, head_dim)
        self.dtype = DTYPES[dtype]

    def keys_values(self, layer: int, tokens: Sequence[int], salt: str = "") -> tuple:
        """Return k and v `[tokens, num_kv_heads, head_dim]` of a layer."""
        hashes = self._hashes(layer, tokens, salt)
        return self._rows(hashes, 1, self.kv_shape), self._rows(hashes, 2, self.kv_shape)

    def queries(self, layer: int, tokens: Sequence[int], salt: str = "") -> np.ndarray:
        """Return q `[tokens, num_qo_heads, head_dim]` of a layer."""
        return self._rows(self._hashes(layer, tokens, salt), 3, self.q_shape)

    def _hashes(self, layer: int, tokens: Sequence[int], salt: str) -> np.ndarray:
        h = layer + 1
        for char in salt:
            h = _mix(h, ord(char) + 2**40)
        hashes = []
        for token in tokens:
            h = _mix(h, int(token))
            hashes.append(h)
        return np.array(hashes, dtype=np.uint64)

    def _rows(self, hashes: np.ndarray, what: int, shape: tuple[int, int]) -> np.ndarray:
        columns = (2 * np.arange(shape[0] * shape[1], dtype=np.uint64) + 1) * np.uint64(
            0x9E3779B97F4A7C15 + 2 * what
        )
        words = (hashes[:, np.newaxis] * columns[np.newaxis, :]) >> np.uint64(40)
        uniform = words.astype(np.float64) / 2**23 - 1
        return uniform.reshape(len(hashes), *shape).astype(self.dtype)


@dataclass
class Entry:
    """What a test knows of one entry of a batch: `count` queries of a sequence from `start` on."""

    seq: int
    tokens: Sequence[int]
    start: int
    count: int
    salt: str = ""

    @property
    def end(self) -> int:
        return self.start + self.count


def begin(cache: ChunkCache, entries: Sequence[Entry | None]) -> Plan:
    """Plan a step of some entries; None is a padding row."""
    counts = [1 if entry is None else entry.count for entry in entries]
    batch = [None if entry is None else entry.seq for entry in entries]
    return cache.plan(batch, [0, *np.cumsum(counts)])


def write(cache: ChunkCache, kv: PrefixKv, plan: Plan, entries: Sequence[Entry | None]) -> None:
    """Write the K/V of a step in every layer."""
    for layer in range(kv.num_layers):
        rows = [
            (np.zeros((1, *kv.kv_shape), kv.dtype),) * 2
            if entry is None
            else [
                part[entry.start :]
                for part in kv.keys_values(layer, entry.tokens[: entry.end], entry.salt)
            ]
            for entry in entries
        ]
        k, v = (np.concatenate(part) for part in zip(*rows, strict=True))
        cache.write_kv(layer, k, v, plan)


def check_attention(
    cache: ChunkCache,
    kv: PrefixKv,
    plan: Plan,
    entries: Sequence[Entry | None],
    *,
    tolerance: float | None = None,
    kernels: Iterable[dict] = ({},),
    **options,
) -> None:
    """Attend in every layer and compare each entry with the reference over its own tokens.

    `kernels` are the keywords of `attend` that must not change the result; `options` those that do.
    """
    tolerance = tolerance or TOLERANCE[np.dtype(kv.dtype).name]
    for layer in range(kv.num_layers):
        parts = [entry_queries(kv, layer, entry) for entry in entries]
        q = np.concatenate(parts)
        expected, expected_lse = (
            np.concatenate(part)
            for part in zip(
                *(
                    expected_rows(kv, layer, entry, rows, options)
                    for entry, rows in zip(entries, parts, strict=True)
                ),
                strict=True,
            )
        )
        for kernel in kernels:
            out, lse = cache.attend(layer, q, plan, return_lse=True, **kernel, **options)
            assert reference.error(out, expected) <= tolerance, kernel
            np.testing.assert_allclose(lse, expected_lse, rtol=tolerance, atol=tolerance)


def entry_queries(kv: PrefixKv, layer: int, entry: Entry | None) -> np.ndarray:
    """Return the queries of an entry; a padding row holds anything."""
    if entry is None:
        return np.full((1, *kv.q_shape), 5.0, kv.dtype)
    return kv.queries(layer, entry.tokens[: entry.end], entry.salt)[entry.start :]


def expected_rows(
    kv: PrefixKv, layer: int, entry: Entry | None, q: np.ndarray, options: dict
) -> tuple[np.ndarray, np.ndarray]:
    """Return what attention must give for an entry."""
    if entry is None:
        return np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    k, v = kv.keys_values(layer, entry.tokens[: entry.end], entry.salt)
    return reference.attention(q, k, v, **options)


def run_step(
    cache: ChunkCache,
    kv: PrefixKv,
    entries: Sequence[Entry | None],
    **options,
) -> list:
    """Run one whole step, check its attention, and commit it; returns who inherits."""
    with begin(cache, entries) as plan:
        write(cache, kv, plan, entries)
        check_attention(cache, kv, plan, entries, **options)
        return cache.commit(plan)


def pending(
    cache: ChunkCache, seq: int, tokens: Sequence[int], salt: str = "", count: int | None = None
) -> Entry:
    """Return the entry of a sequence's next tokens: all that are left, or `count`."""
    info = cache.sequence(seq)
    start = info.num_computed_tokens
    left = info.num_known_tokens - start
    return Entry(seq, tokens, start, left if count is None else count, salt)
