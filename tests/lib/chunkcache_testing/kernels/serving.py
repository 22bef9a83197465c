"""Decoding on a CUDA device through a captured step, each row checked against float64."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from chunkcache import ChunkCache, reference
from chunkcache_testing.devices import to_cuda, to_numpy
from chunkcache_testing.prefix_kv import TOLERANCE, Entry, PrefixKv, pending

LAYERS, KV_HEADS, QO_HEADS, HEAD_DIM, CHUNK = 2, 2, 6, 64, 16


class Serving:
    """A cache, what its sequences hold, and a captured step of `rows` rows.

    In fp8, each layer's and head's keys and values have a scale of their own.
    """

    def __init__(
        self, rows: int, capacity: int = 64, dtype: str = "float16", **options: Any
    ) -> None:
        self.scales: Any = None
        if dtype == "fp8":
            self.scales = np.random.default_rng(7).uniform(0.003, 0.1, (2, LAYERS, KV_HEADS))
            self.scales = self.scales.astype(np.float32)
            options |= {"k_scale": self.scales[0], "v_scale": self.scales[1]}
        self.cache = ChunkCache(
            LAYERS,
            KV_HEADS,
            HEAD_DIM,
            dtype=dtype,
            chunk_size=CHUNK,
            capacity=capacity,
            device="cuda",
            num_qo_heads=QO_HEADS,
            **options,
        )
        for layer in range(LAYERS):
            pages = self.cache.kv_layer(layer)
            pages.copy_(torch.full_like(pages, float("nan"), dtype=torch.float32))
        self.kv = PrefixKv(LAYERS, KV_HEADS, HEAD_DIM, num_qo_heads=QO_HEADS, dtype="float16")
        self.rows = rows
        self.tokens: dict[int, list[int]] = {}
        self.step: Any = None

        def buffer(heads: int) -> torch.Tensor:
            shape = (LAYERS, rows, heads, HEAD_DIM)
            return torch.zeros(shape, dtype=torch.float16, device="cuda")

        self.k, self.v, self.q = buffer(KV_HEADS), buffer(KV_HEADS), buffer(QO_HEADS)
        self.out = buffer(QO_HEADS)

    def insert(self, tokens: Sequence[int]) -> int:
        """Add a sequence and compute all of its prompt but the last token."""
        seq = self.cache.insert(tokens).seq
        self.tokens[seq] = list(tokens)
        entry = pending(self.cache, seq, self.tokens[seq])
        if entry.count > 1:
            entry.count -= 1
            with self.cache.plan([seq], [0, entry.count]) as plan:
                for layer in range(LAYERS):
                    k, v = self.kv.keys_values(layer, entry.tokens[: entry.end])
                    k, v = (to_cuda(part[entry.start :]) for part in (k, v))
                    self.cache.write_kv(layer, k, v, plan)
                self.cache.commit(plan)
        return seq

    def fork(self, seq: int) -> int:
        """Fork a sequence."""
        forked = self.cache.fork(seq).seq
        self.tokens[forked] = list(self.tokens[seq])
        return forked

    def remove(self, seq: int) -> None:
        """End a sequence."""
        self.cache.remove(seq)
        del self.tokens[seq]

    def append(self, seqs: Sequence[int], token: int) -> None:
        """Add a token to each: one that no other sequence has there."""
        for place, seq in enumerate(seqs):
            self.cache.append(seq, token * 100 + place)
            self.tokens[seq].append(token * 100 + place)

    def plan(self, seqs: Sequence[int | None]) -> Any:
        """Plan one row for each sequence."""
        return self.cache.plan(seqs)

    def capture(self, plan: Any) -> Any:
        """Capture a step over the fixed tensors."""
        with self.cache.capture(plan) as step:
            for layer in range(LAYERS):
                rows = slice(0, plan.num_rows)
                self.cache.write_kv(layer, self.k[layer, rows], self.v[layer, rows], plan)
                self.cache.attend(layer, self.q[layer, rows], plan, out=self.out[layer, rows])
        return step

    def decode(self, seqs: Sequence[int | None]) -> None:
        """Replay the captured step for some sequences, capturing it first if need be; check it."""
        entries = [None if s is None else pending(self.cache, s, self.tokens[s]) for s in seqs]
        plan = self.plan(seqs)
        if self.step is None:
            padded = [*seqs, *[None] * (self.rows - len(seqs))]
            plan.close()
            plan = self.plan(padded)
            self.step = self.capture(plan)
            plan.close()
            plan = self.plan(seqs)
        self.fill(entries)
        self.out.fill_(float("nan"))
        self.step.replay(plan)
        self.check(entries)
        self.cache.commit(plan)

    def fill(self, entries: Sequence[Entry | None]) -> None:
        """Put the rows of a step into the fixed tensors."""
        for layer in range(LAYERS):
            for row, entry in enumerate(entries):
                if entry is None:
                    continue
                known = entry.tokens[: entry.end]
                k, v = self.kv.keys_values(layer, known)
                self.k[layer, row], self.v[layer, row] = to_cuda(k[-1]), to_cuda(v[-1])
                self.q[layer, row] = to_cuda(self.kv.queries(layer, known)[-1])

    def stored(self, layer: int, k: Any, v: Any) -> tuple[Any, Any]:
        """What the cache holds in the place of keys and values."""
        if self.scales is None:
            return k, v
        stored_k, stored_v = (
            reference.dequantise_fp8(reference.quantise_fp8(x, scale[layer]), scale[layer])
            for x, scale in zip((k, v), self.scales, strict=True)
        )
        return stored_k, stored_v

    def check(self, entries: Sequence[Entry | None]) -> None:
        """Compare the output with float64, and positions with the sequences."""
        positions = self.step.positions.cpu().tolist()
        for layer in range(LAYERS):
            out = to_numpy(self.out[layer])
            for row, entry in enumerate(entries):
                if entry is None:
                    assert not out[row].any()
                    continue
                assert entry.count == 1
                assert positions[row] == entry.start
                known = entry.tokens[: entry.end]
                k, v = self.stored(layer, *self.kv.keys_values(layer, known))
                q = self.kv.queries(layer, known)[-1:]
                expected, _ = reference.attention(q, k, v)
                assert reference.error(out[row : row + 1], expected) <= TOLERANCE["float16"]
            assert np.isnan(out[len(entries) :]).all()
