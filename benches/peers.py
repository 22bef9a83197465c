"""What a torch user would run for the same decode step, on the same values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Case:
    """One row of the table: a batch of sequences that share their first ``shared`` tokens.

    ``prompt`` is the number of keys of each sequence, one decoded token each.
    """

    batch: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    prompt: int
    shared: int
    dtype: torch.dtype

    @property
    def private(self) -> int:
        """Keys of each sequence that no other sequence has."""
        return self.prompt - self.shared

    @property
    def kv_bytes(self) -> int:
        """Bytes of the distinct K and V: what a step must read at least."""
        tokens = self.shared + self.batch * self.private
        return 2 * tokens * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes that all contenders hold at once, each with K and V of its own."""
        whole = 2 * self.batch * self.prompt * self.num_kv_heads * self.head_dim
        return 4 * self.kv_bytes + 2 * whole * self.dtype.itemsize

    @property
    def operations(self) -> int:
        """Floating-point operations of the two matrix products."""
        return 4 * self.batch * self.num_qo_heads * self.prompt * self.head_dim

    def label(self) -> str:
        """``b32 32/8 d128 2048/1024 f32``."""
        dtype = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[self.dtype]
        return (
            f"b{self.batch} {self.num_qo_heads}/{self.num_kv_heads} d{self.head_dim} "
            f"{self.prompt}/{self.shared} {dtype}"
        )


@dataclass(frozen=True)
class Inputs:
    """Random values of a case.

    ``q [batch, num_qo_heads, head_dim]``; ``shared_k``, ``shared_v [shared, num_kv_heads,
    head_dim]``; ``private_k``, ``private_v [batch, private, num_kv_heads, head_dim]``.
    """

    q: torch.Tensor
    shared_k: torch.Tensor
    shared_v: torch.Tensor
    private_k: torch.Tensor
    private_v: torch.Tensor

    @classmethod
    def random(cls, case: Case, seed: int = 0) -> Inputs:
        """Standard normal values of the case's shapes and dtype."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32).to(case.dtype)

        heads, dim = case.num_kv_heads, case.head_dim
        return cls(
            normal(case.batch, case.num_qo_heads, dim),
            normal(case.shared, heads, dim),
            normal(case.shared, heads, dim),
            normal(case.batch, case.private, heads, dim),
            normal(case.batch, case.private, heads, dim),
        )


def sdpa_forms(case: Case, inputs: Inputs) -> dict[str, Callable[[], torch.Tensor]]:
    """``scaled_dot_product_attention`` in its forms, each sequence with all of its K and V.

    Grouped queries are given as rows of their K/V head, through ``enable_gqa``, and as two batched
    products with a softmax between.
    """
    batch, heads, dim = case.batch, case.num_kv_heads, case.head_dim
    k = torch.empty(batch, heads, case.prompt, dim, dtype=case.dtype)
    v = torch.empty_like(k)
    for whole, shared, private in (
        (k, inputs.shared_k, inputs.private_k),
        (v, inputs.shared_v, inputs.private_v),
    ):
        whole[:, :, : case.shared] = shared.transpose(0, 1)
        whole[:, :, case.shared :] = private.transpose(1, 2)
    grouped = inputs.q.view(batch, heads, -1, dim)
    single = inputs.q.view(batch, case.num_qo_heads, 1, dim)
    scale = dim**-0.5

    def by_rows() -> torch.Tensor:
        return scaled_dot_product_attention(grouped, k, v).view(batch, -1, dim)

    def by_gqa() -> torch.Tensor:
        out = scaled_dot_product_attention(single, k, v, enable_gqa=True)
        return out.view(batch, -1, dim)

    def by_products() -> torch.Tensor:
        scores = torch.matmul(grouped * scale, k.transpose(2, 3))
        return torch.matmul(scores.softmax(-1), v).view(batch, -1, dim)

    forms = {"sdpa": by_rows, "sdpa products": by_products}
    if case.num_qo_heads != case.num_kv_heads:
        forms["sdpa gqa"] = by_gqa
    return forms


def two_phase(case: Case, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Matrix products over the shared part, a batched private part, a log-sum-exp merge."""
    batch, heads, dim = case.batch, case.num_kv_heads, case.head_dim
    group = case.num_qo_heads // heads
    scale = dim**-0.5
    shared_k = inputs.shared_k.transpose(0, 1).contiguous()
    shared_v = inputs.shared_v.transpose(0, 1).contiguous()
    private_k = inputs.private_k.transpose(1, 2).contiguous()
    private_v = inputs.private_v.transpose(1, 2).contiguous()

    def partial(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.matmul(q, k.transpose(-1, -2)).float()
        lse = scores.logsumexp(-1, keepdim=True)
        return torch.matmul((scores - lse).exp().to(v.dtype), v).float(), lse

    def run() -> torch.Tensor:
        q = (inputs.q * scale).view(batch, heads, group, dim)
        states = []
        if case.shared:
            rows = q.transpose(0, 1).reshape(heads, batch * group, dim)
            o, lse = partial(rows, shared_k, shared_v)
            states.append(tuple(x.view(heads, batch, group, -1).transpose(0, 1) for x in (o, lse)))
        if case.private:
            states.append(partial(q, private_k, private_v))
        o, lse = states[0]
        if len(states) == 2:
            other, other_lse = states[1]
            total = torch.logaddexp(lse, other_lse)
            o = o * (lse - total).exp() + other * (other_lse - total).exp()
        return o.reshape(batch, -1, dim).to(inputs.q.dtype)

    return run


def read_floor(num_bytes: int) -> Callable[[], object]:
    """Read a buffer of ``num_bytes`` once: the pace of the memory (or cache) that holds it."""
    buffer = torch.ones(max(num_bytes // 4, 1), dtype=torch.float32)
    return lambda: torch.dot(buffer, buffer)


def product_floor(dtype: torch.dtype, size: int = 1024) -> tuple[Callable[[], object], float]:
    """A square matrix product and its number of floating-point operations."""
    a = torch.randn(size, size).to(dtype)
    b = torch.randn(size, size).to(dtype)
    out = torch.empty(size, size, dtype=dtype)
    return lambda: torch.matmul(a, b, out=out), 2.0 * size**3
