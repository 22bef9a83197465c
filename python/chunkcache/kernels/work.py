"""Work items: what the attention kernel reads beside a plan's own tables.

They are cut in Rust (`rust/core/src/plan/items`); here are their shapes as arrays.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from chunkcache import _core
from chunkcache._core import Plan

NONE = 0xFFFFFFFF
STAGE_KEYS = 32
ITEM_WORDS = 32
ITEM_HEAD_WORDS = 16

Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class PlanTables:
    """The context tables of one step (`rust/core/src/plan/view.rs`), as arrays of u32.

    Attributes:
        page_size: tokens of a page.
        num_qo_rows: rows of q and of the output, padding rows included.
        order: `[n]` rows of `sequences`, depth first.
        sequences: `[rows, 5]` leaf, qo_begin, qo_len, kv_len, num_cached_rows.
        segment_order: `[m]` rows of `segments`, parents before children.
        segments: `[rows, 6]` parent, seq_begin, seq_end, start_pos, num_pages, ids_begin.
        page_ids: page numbers of all segments.
    """

    page_size: int
    num_qo_rows: int
    order: Words
    sequences: Words
    segment_order: Words
    segments: Words
    page_ids: Words


@dataclass(frozen=True)
class DeviceCosts:
    """Measured constants of one device, in the time of one key of one head at full bandwidth.

    The defaults are an H200's, from the sweep that `cuda/NOTES.md` records.

    Attributes:
        num_blocks: blocks of the persistent grid, one a multiprocessor.
        item: what an item costs beside its keys.
        row_tile: tensor-core time of one 16-row tile per key; hidden behind the read below 1.
        partial_row: writing and merging one partial row.
    """

    num_blocks: int = 132
    item: float = 150.0
    row_tile: float = 0.2
    partial_row: float = 8.0

    def for_item_size(self, num_bytes: int) -> "DeviceCosts":
        """Return the constants for K and V of so many bytes an element: they are for two."""
        factor = 2 / num_bytes
        return replace(
            self,
            item=self.item * factor,
            row_tile=self.row_tile * factor,
            partial_row=self.partial_row * factor,
        )

    def packed(self) -> tuple[int, float, float, float]:
        """Return the constants as the core takes them."""
        return self.num_blocks, self.item, self.row_tile, self.partial_row


@dataclass(frozen=True)
class Heads:
    """The head shape that items are cut for.

    Attributes:
        num_kv_heads: K/V heads.
        group: query heads per K/V head.
        warps: consumer warps of a block (8 up to head_dim 128, else 4).
        grouped: whether four warps multiply as a warpgroup, 64 rows at a time.
    """

    num_kv_heads: int
    group: int
    warps: int
    grouped: bool = False

    def packed(self) -> tuple[int, int, int, bool]:
        """Return the shape as the core takes it."""
        return self.num_kv_heads, self.group, self.warps, self.grouped


@dataclass(frozen=True)
class Schedule:
    """A cut.

    Attributes:
        items: `[n, 32]` (`ItemRow` in `cuda/params.h`).
        merge_items: `[m, 4]` tok_begin, num_tok, first_unit, num_units (`MergeItem`).
        tokens: `[tokens, 4]` q_row, seq, merge_begin, num_partials; depth-first order.
        merges: `[entries, 2]` slot base and stride per K/V head, in split order per token, without
            the state that the finishing item keeps.
        pad_rows: output rows that no key reaches.
        num_slots: partial states to make room for, a multiple of 8.
    """

    items: Words
    merge_items: Words
    tokens: Words
    merges: Words
    pad_rows: Words
    num_slots: int


def cut_plan(plan: Plan, heads: Heads, costs: DeviceCosts) -> Schedule:
    """Cut a plan into work items.

    Raises:
        InvalidConfigError: more query heads per K/V head than one block can hold rows.
        StalePlanError: the plan is closed.
    """
    return _schedule(plan.cut(heads.packed(), costs.packed()))


def cut_tables(tables: PlanTables, heads: Heads, costs: DeviceCosts | None = None) -> Schedule:
    """Cut tables that were made by hand; for an H200 without `costs`.

    Raises:
        InvalidConfigError: tables that name rows that are not there, or as `cut_plan`.
    """
    flat = (
        np.ascontiguousarray(words, dtype=np.uint32).reshape(-1)
        for words in (
            tables.order,
            tables.sequences,
            tables.segment_order,
            tables.segments,
            tables.page_ids,
        )
    )
    order, sequences, segment_order, segments, page_ids = flat
    packed = (
        tables.page_size,
        tables.num_qo_rows,
        order,
        sequences,
        segment_order,
        segments,
        page_ids,
    )
    return _schedule(_core.cut_tables(packed, heads.packed(), (costs or DeviceCosts()).packed()))


def plan_tables(plan: Plan) -> PlanTables:
    """Return a plan's context tables as arrays.

    Raises:
        StalePlanError: the plan is closed.
    """
    page_size, num_qo_rows, order, sequences, segment_order, segments, page_ids = plan.tables()
    return PlanTables(
        page_size=page_size,
        num_qo_rows=num_qo_rows,
        order=order,
        sequences=sequences.reshape(-1, 5),
        segment_order=segment_order,
        segments=segments.reshape(-1, 6),
        page_ids=page_ids,
    )


def _schedule(arrays: tuple[Any, Any, Any, Any, Any, int]) -> Schedule:
    items, merge_items, tokens, merges, pad_rows, num_slots = arrays
    return Schedule(
        items.reshape(-1, ITEM_WORDS),
        merge_items.reshape(-1, 4),
        tokens.reshape(-1, 4),
        merges.reshape(-1, 2),
        pad_rows,
        num_slots,
    )
