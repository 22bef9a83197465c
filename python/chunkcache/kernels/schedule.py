"""Work items: how a plan's segments are cut for the multiprocessors of one device.

A plan says which sequences cover which pages. The kernel (`cuda/tpp_attention.cuh`) wants a list of
items of about equal cost, shared segments first: a slice of a segment's pages, a run of K/V heads,
a tile of query rows. Each slice leaves one partial state per row and head, so the cut is a balance:
enough items to fill the device, few enough that their partials do not cost more than they save.

The tables depend on the plan's structure only, not on its lengths: a private segment's last slice
is open at its end, and the kernel bounds it by the sequence's own length.
"""

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from chunkcache.errors import InvalidConfigError

NONE = 0xFFFFFFFF
STAGE_KEYS = 32
WARP_ROWS = 16
ITEM_WORDS = 32
ITEM_HEAD_WORDS = 16
INLINE_PAGES = ITEM_WORDS - ITEM_HEAD_WORDS

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
    item: float = 300.0
    row_tile: float = 0.3
    partial_row: float = 2.0


@dataclass(frozen=True)
class Heads:
    """The head shape that items are cut for.

    Attributes:
        num_kv_heads: K/V heads.
        group: query heads per K/V head.
        warps: consumer warps of a block (8 up to head_dim 128, else 4).
    """

    num_kv_heads: int
    group: int
    warps: int


@dataclass(frozen=True)
class Tile:
    """Query tokens `[tok_begin, tok_end)` that read keys `[first_key, num_keys)` of a segment."""

    segment: int
    tok_begin: int
    tok_end: int
    keys: int
    open_end: bool
    bounded: bool
    seq: int
    first_query: int
    rows: int
    row_tiles: int


@dataclass(frozen=True)
class Schedule:
    """What the kernel reads beside the plan's own rows.

    Attributes:
        items: `[n, 32]` (`ItemRow` in `cuda/params.h`), shared segments first.
        tokens: `[tokens, 4]` q_row, seq, merge_begin, num_partials; depth-first order.
        merges: `[entries, 2]` slot base and stride per K/V head, in split order per token.
        pad_rows: output rows that no key reaches.
        num_slots: partial states to make room for.
    """

    items: Words
    tokens: Words
    merges: Words
    pad_rows: Words
    num_slots: int
    makespan: float = field(compare=False)


def build_schedule(plan: PlanTables, heads: Heads, costs: DeviceCosts | None = None) -> Schedule:
    """Cut a plan into work items.

    Args:
        plan: the context tables.
        heads: the head shape.
        costs: the device's constants; those of an H200 if None.

    Raises:
        InvalidConfigError: more query heads per K/V head than one block can hold rows.
    """
    costs = costs or DeviceCosts()
    max_rows = heads.warps * WARP_ROWS
    if heads.group > max_rows:
        raise InvalidConfigError(
            f"num_qo_heads / num_kv_heads: got {heads.group}, allowed is up to {max_rows}"
        )
    order = plan.order
    rows = plan.sequences[order].astype(np.int64)
    qo_len, kv_len = rows[:, 2], rows[:, 3]
    token_start = np.concatenate([[0], np.cumsum(qo_len)])
    num_tokens = int(token_start[-1])
    seq_of = np.repeat(order, qo_len)
    index_of = np.repeat(np.arange(len(order)), qo_len)
    query = np.arange(num_tokens) - token_start[index_of]
    position = (kv_len - qo_len)[index_of] + query
    q_row = rows[index_of, 1] + query

    tiles = _tiles(plan, heads, token_start, seq_of, query, position)
    page_stride = max(STAGE_KEYS // plan.page_size, 1) * plan.page_size
    slice_keys = _choose_slices(tiles, heads, costs, page_stride)

    items: list[tuple[bool, float, list[int]]] = []
    entries: list[tuple[int, int, int, int]] = []  # token range, slot base, stride
    slots = 0
    for tile, keys in zip(tiles, slice_keys, strict=True):
        segment = plan.segments[tile.segment]
        starts = list(range(0, max(tile.keys, 1), keys))
        for start in starts:
            last = start == starts[-1]
            count = keys
            if last:
                count = NONE if tile.open_end else int(segment[4]) * plan.page_size - start
            cost_keys = min(keys, tile.keys - start)
            first_id = int(segment[5]) + start // plan.page_size
            held = -(-min(int(segment[4]) * plan.page_size - start, count) // plan.page_size)
            inline = plan.page_ids[first_id : first_id + min(held, INLINE_PAGES)].tolist()
            inline += [0] * (INLINE_PAGES - len(inline))
            for kv_head, num_heads, key_groups in _head_runs(tile, heads, min(keys, tile.keys)):
                cost = _item_cost(tile, cost_keys, num_heads, costs)
                slot = slots + kv_head * tile.rows
                items.append(
                    (
                        tile.seq != NONE,
                        cost,
                        [
                            first_id,
                            count,
                            int(segment[3]) + start,
                            kv_head,
                            num_heads,
                            tile.tok_begin,
                            tile.tok_end - tile.tok_begin,
                            slot,
                            tile.seq,
                            tile.first_query,
                            tile.row_tiles,
                            key_groups,
                            int(tile.bounded),
                            0,
                            0,
                            0,
                            *inline,
                        ],
                    )
                )
            entries.append((tile.tok_begin, tile.tok_end, slots, tile.rows))
            slots += heads.num_kv_heads * tile.rows

    tokens, merges = _merge_tables(entries, num_tokens, heads.group)
    tokens[:, 0] = q_row
    tokens[:, 1] = seq_of
    items.sort(key=_turn)
    table = np.array([words for _, _, words in items], dtype=np.uint32).reshape(-1, ITEM_WORDS)
    _finish_alone(table, tokens)
    if len(table) <= costs.num_blocks:
        _share_merging(table, tokens)
    reached = tokens[:, 3] > 0
    named = np.zeros(plan.num_qo_rows, dtype=bool)
    named[tokens[reached, 0]] = True
    return Schedule(
        items=table,
        tokens=tokens,
        merges=merges,
        pad_rows=np.flatnonzero(~named).astype(np.uint32),
        num_slots=slots,
        makespan=_makespan([cost for _, cost, _ in items], costs.num_blocks),
    )


def _tiles(
    plan: PlanTables,
    heads: Heads,
    token_start: npt.NDArray[np.int64],
    seq_of: Words,
    query: npt.NDArray[np.int64],
    position: npt.NDArray[np.int64],
) -> list[Tile]:
    max_tokens = heads.warps * WARP_ROWS // heads.group
    tiles = []
    for row in plan.segment_order:
        parent_unused, seq_begin, seq_end, start, num_pages, _ = (
            int(x) for x in plan.segments[row]
        )
        del parent_unused
        begin, end = int(token_start[seq_begin]), int(token_start[seq_end])
        if begin == end or num_pages == 0:
            continue
        length = num_pages * plan.page_size
        single = seq_end - seq_begin == 1
        leaf = single and int(plan.sequences[seq_of[begin], 0]) == int(row)
        num_tiles = -(-(end - begin) // max_tokens)
        per_tile = -(-(end - begin) // num_tiles)
        for tok_begin in range(begin, end, per_tile):
            tok_end = min(tok_begin + per_tile, end)
            seen = position[tok_begin:tok_end]
            keys = min(length, int(seen.max()) + 1 - start)
            if keys <= 0 and not leaf:
                continue
            rows = (tok_end - tok_begin) * heads.group
            row_tiles = 1
            while row_tiles * WARP_ROWS < rows:
                row_tiles *= 2
            tiles.append(
                Tile(
                    segment=int(row),
                    tok_begin=tok_begin,
                    tok_end=tok_end,
                    keys=max(keys, 0),
                    open_end=leaf,
                    bounded=leaf or start + length > int(seen.min()) + 1,
                    seq=int(seq_of[tok_begin]) if single else NONE,
                    first_query=int(query[tok_begin]) if single else 0,
                    rows=rows,
                    row_tiles=row_tiles,
                )
            )
    return tiles


def _head_runs(tile: Tile, heads: Heads, keys: int) -> list[tuple[int, int, int]]:
    """`(first K/V head, K/V heads, key groups)` of the items of one slice."""
    warps = heads.warps // tile.row_tiles
    blocks = max(-(-keys // STAGE_KEYS), 1)
    # Heads side by side need no reduction over warps; key groups make fewer partials.
    side_by_side = tile.seq != NONE or blocks * 2 <= warps
    run = min(heads.num_kv_heads, warps) if side_by_side else 1
    groups = 1
    while groups * 2 * run <= warps and groups * 2 <= blocks:
        groups *= 2
    return [
        (first, min(run, heads.num_kv_heads - first), groups)
        for first in range(0, heads.num_kv_heads, run)
    ]


def _item_cost(tile: Tile, keys: int, num_heads: int, costs: DeviceCosts) -> float:
    tensor = costs.row_tile * tile.row_tiles
    return costs.item + num_heads * (keys * max(1.0, tensor) + costs.partial_row * tile.rows)


def _choose_slices(
    tiles: list[Tile], heads: Heads, costs: DeviceCosts, page_stride: int
) -> list[int]:
    """Keys per slice of each tile: the candidate whose longest block is shortest."""
    total = sum(
        heads.num_kv_heads * tile.keys * max(1.0, costs.row_tile * tile.row_tiles) for tile in tiles
    )
    share = total / costs.num_blocks
    best: tuple[float, list[int]] | None = None
    tried: set[tuple[int, ...]] = set()
    for private in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0):
        for shared in (0.75, 0.95, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0):
            slices = [
                _slice_keys(
                    tile,
                    heads,
                    costs,
                    share / (shared if tile.seq == NONE else private),
                    page_stride,
                )
                for tile in tiles
            ]
            key = tuple(slices)
            if key in tried:
                continue
            tried.add(key)
            costs_of: list[tuple[bool, float]] = []
            for tile, keys in zip(tiles, slices, strict=True):
                runs = _head_runs(tile, heads, min(keys, tile.keys))
                for start in range(0, max(tile.keys, 1), keys):
                    here = min(keys, tile.keys - start)
                    costs_of += [
                        (tile.seq != NONE, _item_cost(tile, here, run, costs)) for _, run, _ in runs
                    ]
            costs_of.sort(key=_turn)
            span = _makespan([cost for _, cost in costs_of], costs.num_blocks)
            if best is None or span < best[0]:
                best = (span, slices)
    return best[1] if best else []


def _slice_keys(
    tile: Tile, heads: Heads, costs: DeviceCosts, target: float, page_stride: int
) -> int:
    """Keys of each slice of a tile whose items shall cost about `target`."""
    run = _head_runs(tile, heads, tile.keys)[0][1]
    weight = run * max(1.0, costs.row_tile * tile.row_tiles)
    count = max(1, -(-int(tile.keys * weight) // max(int(target), 1)))
    keys = -(-max(tile.keys, 1) // count)
    return max(-(-keys // page_stride) * page_stride, page_stride)


def _turn(item: tuple[bool, float] | tuple[bool, float, list[int]]) -> tuple[bool, float]:
    """Shared segments first: their products and reductions hide behind the private reads.

    Within each kind the most expensive come first.
    """
    return item[0], -item[1]


def _makespan(costs: list[float], blocks: int) -> float:
    """The longest block when items go, in their order, to the block that is free first."""
    if len(costs) <= blocks:
        return max(costs, default=0.0)
    loads = costs[:blocks]
    heapq.heapify(loads)
    for cost in costs[blocks:]:
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def _merge_tables(
    entries: list[tuple[int, int, int, int]], num_tokens: int, group: int
) -> tuple[Words, Words]:
    tokens = np.zeros((num_tokens, 4), dtype=np.uint32)
    if not entries:
        return tokens, np.zeros((0, 2), dtype=np.uint32)
    token = np.concatenate([np.arange(begin, end) for begin, end, _, _ in entries])
    base = np.concatenate(
        [slot + np.arange(end - begin) * group for begin, end, slot, _ in entries]
    )
    stride = np.repeat([e[3] for e in entries], [e[1] - e[0] for e in entries])
    by_token = np.argsort(token, kind="stable")
    counts = np.bincount(token, minlength=num_tokens)
    tokens[:, 2] = np.concatenate([[0], np.cumsum(counts)[:-1]])
    tokens[:, 3] = counts
    return tokens, np.stack([base[by_token], stride[by_token]], axis=1).astype(np.uint32)


def _finish_alone(items: Words, tokens: Words) -> None:
    """Items all of whose tokens have this one partial write the output themselves."""
    for item in items:
        begin, count = int(item[5]), int(item[6])
        if (tokens[begin : begin + count, 3] == 1).all():
            item[7] = NONE


def _share_merging(items: Words, tokens: Words) -> None:
    """Let the splits of a tile divide its rows among them for the merge, as all run at once."""
    splits: dict[tuple[int, ...], list[int]] = {}
    for row, item in enumerate(items):
        splits.setdefault(tuple(int(item[i]) for i in (5, 6, 3, 4)), []).append(row)
    for (begin, count, _, _), rows in splits.items():
        partials = tokens[begin : begin + count, 3]
        if len(rows) < 2 or (partials != len(rows)).any():
            continue
        for owner, row in enumerate(rows):
            items[row, 13] = owner
            items[row, 14] = len(rows)
