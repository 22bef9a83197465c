"""Work items: every key of every row exactly once, every partial merged exactly once."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkcache.errors import InvalidConfigError
from chunkcache.kernels.work import (
    ITEM_HEAD_WORDS,
    NONE,
    DeviceCosts,
    Heads,
    PlanTables,
    Schedule,
    cut_tables,
)
from chunkcache_testing.kernels.trees import Node, build

INLINE_PAGES = 16


def cover(plan: PlanTables, schedule: Schedule, heads: Heads) -> None:
    """Walk the items as the kernel does, on sets of keys instead of numbers."""
    seen: dict[tuple[int, int], list[int]] = {}
    slots: dict[int, tuple[int, int, int]] = {}
    done: set[tuple[int, int, int]] = set()
    tokens = schedule.tokens.astype(np.int64)

    def finish(t: int, head: int, g: int) -> None:
        assert (t, head, g) not in done
        done.add((t, head, g))
        begin, count = tokens[t, 2:]
        for base, stride in schedule.merges[begin : begin + count].astype(np.int64):
            assert slots.pop(base + head * stride + g) == (t, head, g)

    for item in schedule.items.astype(np.int64):
        ids_begin, num_keys, start, kv_head, num_heads, tok, num_tok, slot = item[:8]
        row_tiles, key_groups = item[10], item[11]
        rows = num_tok * heads.group
        assert rows <= row_tiles * 16
        assert row_tiles * num_heads * key_groups <= heads.warps
        positions = []
        for t in range(tok, tok + num_tok):
            seq = plan.sequences[tokens[t, 1]].astype(np.int64)
            positions.append(seq[3] - seq[2] + tokens[t, 0] - seq[1])
        end = start + num_keys if num_keys != NONE else max(positions) + 1
        end = max(min(end, max(positions) + 1), start)
        if not item[12]:
            assert end == start + num_keys
            assert min(positions) + 1 >= end
        pages = -(-(end - start) // plan.page_size)
        listed = plan.page_ids[ids_begin : ids_begin + pages]
        inline = item[ITEM_HEAD_WORDS : ITEM_HEAD_WORDS + min(pages, INLINE_PAGES)]
        assert (inline == listed[: len(inline)]).all()
        assert slot != NONE or key_groups == 1
        stride = rows if rows < 8 else -(-rows // 8) * 8
        for head, group in itertools.product(range(num_heads), range(key_groups)):
            for row in range(rows):
                at = (int(tok + row // heads.group), int(kv_head + head), int(row % heads.group))
                if slot != NONE:
                    slots_of_row = slot + (head * key_groups + group) * stride + row
                    assert slots_of_row not in slots
                    assert slots_of_row < schedule.num_slots
                    slots[slots_of_row] = at
                elif group == 0:
                    finish(*at)
        for head in range(kv_head, kv_head + num_heads):
            for i, t in enumerate(range(tok, tok + num_tok)):
                seen.setdefault((t, head), []).extend(range(start, min(end, positions[i] + 1)))
    for tok, num_tok, first_unit, num_units in schedule.merge_items.astype(np.int64):
        rows = num_tok * heads.group
        for at in range(8 * first_unit, 8 * (first_unit + num_units)):
            head, row = divmod(at, rows)
            if head < heads.num_kv_heads:
                finish(tok + row // heads.group, head, row % heads.group)
    assert not slots
    for t, (_, seq, _, _) in enumerate(tokens):
        row = plan.sequences[seq].astype(np.int64)
        position = row[3] - row[2] + tokens[t, 0] - row[1]
        for head in range(heads.num_kv_heads):
            assert sorted(seen.get((t, head), [])) == list(range(position + 1))
            assert all((t, head, g) in done for g in range(heads.group))


FOREST = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(1, 300), min_size=1, max_size=5)),
    min_size=1,
    max_size=3,
)


@given(
    groups=FOREST,
    page_size=st.sampled_from([16, 48, 64, 128]),
    qo_len=st.integers(1, 9),
    group=st.sampled_from([1, 3, 8, 40]),
    num_kv_heads=st.integers(1, 12),
    warps=st.sampled_from([4, 8]),
    num_blocks=st.sampled_from([1, 10, 132, 1000]),
    grouped=st.booleans(),
)
def test_every_key_once(groups, page_size, qo_len, group, num_kv_heads, warps, num_blocks, grouped):
    roots = [
        Node(
            shared * page_size * 3,
            tuple(Node(max(tail, qo_len), ends=((qo_len, 0),)) for tail in tails),
        )
        for shared, tails in groups
    ]
    rng = np.random.default_rng(3)
    plan = build(roots, page_size, 5000, rng).tables
    heads = Heads(num_kv_heads, group, warps, grouped)
    cover(plan, cut_tables(plan, heads, DeviceCosts(num_blocks=num_blocks)), heads)


def test_rows_without_keys_are_listed():
    plan = build([Node(10, ends=((1, 0),))], 16, 4, np.random.default_rng(0), padding=3).tables
    schedule = cut_tables(plan, Heads(1, 1, 8))
    named = set(schedule.tokens[:, 0].tolist())
    assert sorted(named | set(schedule.pad_rows.tolist())) == [0, 1, 2, 3]
    assert len(schedule.pad_rows) == 3


def test_too_many_query_heads_are_refused():
    plan = build([Node(10, ends=((1, 0),))], 16, 4, np.random.default_rng(0)).tables
    with pytest.raises(InvalidConfigError, match="num_qo_heads / num_kv_heads: got 129"):
        cut_tables(plan, Heads(1, 129, 8))
