"""Work items: every key of every row exactly once, every partial merged exactly once."""

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

from .trees import Node, build

INLINE_PAGES = 16


def cover(plan: PlanTables, schedule: Schedule, heads: Heads) -> None:
    """Walk the items as the kernel does, on sets of keys instead of numbers."""
    seen: dict[tuple[int, int], list[int]] = {}
    slots: dict[int, tuple[int, int, int]] = {}
    owners: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for item in schedule.items.astype(np.int64):
        ids_begin, num_keys, start, kv_head, num_heads, tok, num_tok, slot = item[:8]
        row_tiles, key_groups = item[10], item[11]
        rows = num_tok * heads.group
        assert rows <= row_tiles * 16
        assert row_tiles * num_heads * key_groups <= heads.warps
        positions = []
        for t in range(tok, tok + num_tok):
            seq = plan.sequences[schedule.tokens[t, 1]].astype(np.int64)
            positions.append(seq[3] - seq[2] + schedule.tokens[t, 0] - seq[1])
        end = start + num_keys if num_keys != NONE else max(positions) + 1
        end = min(end, max(positions) + 1)
        if not item[12]:
            assert end == start + num_keys
            assert min(positions) + 1 >= end
        pages = -(-(end - start) // plan.page_size)
        listed = plan.page_ids[ids_begin : ids_begin + pages]
        inline = item[ITEM_HEAD_WORDS : ITEM_HEAD_WORDS + min(pages, INLINE_PAGES)]
        assert (inline == listed[: len(inline)]).all()
        for head in range(kv_head, kv_head + num_heads):
            for i, t in enumerate(range(tok, tok + num_tok)):
                keys = seen.setdefault((t, head), [])
                keys += range(start, min(end, positions[i] + 1))
                for g in range(heads.group):
                    if slot != NONE:
                        at = slot + (head - kv_head) * rows + i * heads.group + g
                        assert at not in slots
                        slots[at] = (t, head, g)
                owners.setdefault((t, head), []).append((item[13], item[14]))
            if slot == NONE:
                assert len(owners[tok, head]) == 1
    for t, (_, seq, begin, count) in enumerate(schedule.tokens.astype(np.int64)):
        row = plan.sequences[seq].astype(np.int64)
        position = row[3] - row[2] + schedule.tokens[t, 0] - row[1]
        for head in range(heads.num_kv_heads):
            assert sorted(seen.get((t, head), [])) == list(range(position + 1))
            claims = owners.get((t, head), [])
            assert len(claims) == count
            if any(total for _, total in claims):
                assert sorted(claims) == [(i, count) for i in range(count)]
            if count > 1:
                for base, stride in schedule.merges[begin : begin + count].astype(np.int64):
                    for g in range(heads.group):
                        assert slots.pop(base + head * stride + g) == (t, head, g)


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
)
def test_every_key_once(groups, page_size, qo_len, group, num_kv_heads, warps, num_blocks):
    roots = [
        Node(
            shared * page_size * 3,
            tuple(Node(max(tail, qo_len), ends=((qo_len, 0),)) for tail in tails),
        )
        for shared, tails in groups
    ]
    rng = np.random.default_rng(3)
    plan = build(roots, page_size, 5000, rng).tables
    heads = Heads(num_kv_heads, group, warps)
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
