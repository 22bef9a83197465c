"""A decode step of a case in a :class:`chunkcache.ChunkCache`, with sharing and without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from peers import Case, Inputs

from chunkcache import ChunkCache

CHUNK_SIZE = 64


def decode_step(
    case: Case, inputs: Inputs, *, sharing: bool, num_threads: int
) -> Callable[[], torch.Tensor]:
    """Fill a cache with the case's values and return the attention of one step over it.

    Without sharing each sequence has its own copy of the shared tokens, as a paged cache without
    prefix sharing has.
    """
    chunks_each = -(-case.prompt // CHUNK_SIZE)
    cache = ChunkCache(
        1,
        case.num_kv_heads,
        case.head_dim,
        dtype=case.dtype,
        chunk_size=CHUNK_SIZE,
        capacity=case.batch * chunks_each,
        num_threads=num_threads,
        enable_prefix_sharing=sharing,
    )
    sequences = []
    for row in range(case.batch):
        first_private = 1 + case.shared + row * case.private
        tokens = [*range(1, 1 + case.shared), *range(first_private, first_private + case.private)]
        k = torch.cat([inputs.shared_k, inputs.private_k[row]])
        v = torch.cat([inputs.shared_v, inputs.private_v[row]])
        inserted = cache.insert(tokens)
        begin, end = inserted.num_computed_tokens, case.prompt - 1
        if begin < end:
            with cache.plan([inserted.seq], [0, end - begin]) as plan:
                cache.write_kv(0, k[begin:end], v[begin:end], plan)
                cache.commit(plan)
        sequences.append(inserted.seq)
    last_k, last_v = (
        private[:, -1] if case.private else shared[-1:].expand(case.batch, -1, -1)
        for shared, private in (
            (inputs.shared_k, inputs.private_k),
            (inputs.shared_v, inputs.private_v),
        )
    )
    plan = cache.plan(sequences)
    cache.write_kv(0, last_k, last_v, plan)
    out = torch.empty_like(inputs.q)
    return lambda: cache.attend(0, inputs.q, plan, out=out)
