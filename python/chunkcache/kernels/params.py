"""The bytes of `TppParams` (`cuda/params.h`)."""

import struct
from dataclasses import dataclass

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Strides:
    """Strides of K or V pages in bytes."""

    page: int
    head: int
    token: int


@dataclass(frozen=True)
class Operands:
    """Addresses and strides (in elements) of q, the output and the lse."""

    q: int
    q_row: int
    q_head: int
    out: int
    out_row: int
    out_head: int
    lse: int


@dataclass(frozen=True)
class TableAddresses:
    """Device addresses of the tables and the workspace."""

    header: int
    items: int
    merge_items: int
    tokens: int
    sequences: int
    merges: int
    page_ids: int
    pad_rows: int
    partial_out: int
    partial_lse: int
    queue: int


@dataclass(frozen=True)
class Scores:
    """How scores become weights.

    Attributes:
        sm_scale: factor of q.k.
        logits_soft_cap: 0 for none.
        window_left: -1 for none.
    """

    sm_scale: float
    logits_soft_cap: float
    window_left: int


@dataclass(frozen=True)
class Shape:
    """The run-time sizes of a launch."""

    group: int
    num_qo_heads: int
    page_size: int
    box_tokens: int
    ring_stages: int


def tpp_params(
    maps: tuple[bytes, bytes],
    kv: tuple[int, int],
    kv_scales: tuple[int, int],
    strides: tuple[Strides, Strides],
    operands: Operands,
    tables: TableAddresses,
    shape: Shape,
    scores: Scores,
    *,
    q_is_bf16: bool,
) -> bytes:
    """Pack the parameters of one launch.

    Args:
        maps: the tensor maps of K and V, 128 bytes each (zeros on the path without them).
        kv: addresses of K's and V's page 0.
        kv_scales: addresses of their scales for each head, 0 for 1.
        strides: K's and V's strides.
        operands: q, output, lse.
        tables: the tables and the workspace.
        shape: run-time sizes.
        scores: scale, cap and window.
        q_is_bf16: whether q and the output are bf16, not f16, where K and V are fp8.
    """
    if scores.logits_soft_cap > 0:
        scale = scores.sm_scale / scores.logits_soft_cap
        cap = scores.logits_soft_cap * LOG2_E
    else:
        scale, cap = scores.sm_scale * LOG2_E, 0.0
    k, v = strides
    packed = (
        maps[0]
        + maps[1]
        + struct.pack("<2Q", *kv)
        + struct.pack("<6q", k.page, k.head, k.token, v.page, v.head, v.token)
        + struct.pack("<Q2q", operands.q, operands.q_row, operands.q_head)
        + struct.pack("<Q2q", operands.out, operands.out_row, operands.out_head)
        + struct.pack("<Q", operands.lse)
        + struct.pack(
            "<11Q",
            tables.header,
            tables.items,
            tables.merge_items,
            tables.tokens,
            tables.sequences,
            tables.merges,
            tables.page_ids,
            tables.pad_rows,
            tables.partial_out,
            tables.partial_lse,
            tables.queue,
        )
        + struct.pack(
            "<5Ii2f2I2Q2I",
            shape.group,
            shape.num_qo_heads,
            shape.page_size,
            shape.box_tokens,
            shape.ring_stages,
            scores.window_left,
            scale,
            cap,
            -(-(1 << 32) // shape.ring_stages),
            0 if shape.group == 1 else -(-(1 << 32) // shape.group),
            *kv_scales,
            q_is_bf16,
            0,
        )
    )
    return packed + bytes(-len(packed) % 64)
