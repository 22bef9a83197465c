"""Decode steps over prefix trees: what they read, their plan tables with sharing and without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from chunkcache.kernels.work import NONE, PlanTables

HEAD_DIM = 128

PageIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    """One token for each of `batch` sequences, which are spread evenly over a tree's leaves.

    Attributes:
        name: the row's name.
        batch: sequences.
        num_qo_heads: query heads.
        num_kv_heads: K/V heads.
        nodes: nodes of each level, the root's level first.
        tokens: tokens of a node of each level, a multiple of the page size but for the last.
        page_size: tokens of a page.
        goal: microseconds to reach, 0 for none.
        item_size: bytes of an element of K and V: 2 in float16, 1 in fp8 (e4m3).
    """

    name: str
    batch: int
    num_qo_heads: int
    num_kv_heads: int
    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    page_size: int = 64
    goal: float = 0.0
    item_size: int = 2

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return sum(self.tokens)

    @property
    def group(self) -> int:
        """Query heads of a K/V head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def is_shared(self) -> bool:
        """Whether any token is common to two sequences."""
        return self.nodes[0] < self.batch

    def _bytes(self, tokens: int) -> int:
        return tokens * self.num_kv_heads * HEAD_DIM * 2 * self.item_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of the distinct K and V: what a step has to read."""
        return self._bytes(sum(n * t for n, t in zip(self.nodes, self.tokens, strict=True)))

    @property
    def unshared_bytes(self) -> int:
        """Bytes of K and V if every sequence has its own."""
        return self._bytes(self.batch * self.context)

    @property
    def held_bytes(self) -> int:
        """Bytes that a copy of the pages takes."""
        return self._bytes(len(self.page_ids) * self.page_size)

    def pages_of(self, level: int) -> int:
        """Return the pages of a node of a level."""
        return -(-self.tokens[level] // self.page_size)

    @cached_property
    def page_ids(self) -> PageIds:
        """Page numbers of all nodes, level by level: a random permutation."""
        total = sum(n * self.pages_of(level) for level, n in enumerate(self.nodes))
        return np.random.default_rng(7).permutation(total)

    def level_pages(self, level: int) -> PageIds:
        """Return the page numbers of a level's nodes, `[nodes, pages]`."""
        begin = sum(n * self.pages_of(above) for above, n in enumerate(self.nodes[:level]))
        count = self.nodes[level] * self.pages_of(level)
        return self.page_ids[begin : begin + count].reshape(self.nodes[level], -1)

    def node_of(self, level: int) -> PageIds:
        """Return each sequence's node of a level, `[batch]`."""
        return np.arange(self.batch) * self.nodes[level] // self.batch

    def block_table(self) -> PageIds:
        """Return each sequence's pages, `[batch, pages]`."""
        levels = range(len(self.nodes))
        return np.concatenate([self.level_pages(at)[self.node_of(at)] for at in levels], axis=1)

    def tables(self) -> PlanTables:
        """Return the tables of a step that shares what the tree shares."""
        segments: list[list[int]] = []
        first: list[int] = []
        for level, nodes in enumerate(self.nodes):
            first.append(len(segments))
            covering = self.node_of(level)
            for node in range(nodes):
                begin, end = np.searchsorted(covering, [node, node + 1])
                parent = NONE
                if level:
                    parent = first[level - 1] + int(self.node_of(level - 1)[begin])
                pages = self.pages_of(level)
                ids = pages * node + sum(
                    n * self.pages_of(above) for above, n in enumerate(self.nodes[:level])
                )
                start = sum(self.tokens[:level])
                segments.append([parent, int(begin), int(end), start, pages, ids])
        return self._tables(segments, first[-1] + self.node_of(len(self.nodes) - 1), self.page_ids)

    def unshared_tables(self) -> PlanTables:
        """Return the tables of a step over the same pages that reads all for each sequence."""
        table = self.block_table()
        segments = [
            [NONE, i, i + 1, 0, table.shape[1], i * table.shape[1]] for i in range(self.batch)
        ]
        return self._tables(segments, np.arange(self.batch), table.reshape(-1))

    def _tables(self, segments: list[list[int]], leaf: PageIds, page_ids: PageIds) -> PlanTables:
        sequences = np.zeros((self.batch, 5), dtype=np.uint32)
        sequences[:, 0] = leaf
        sequences[:, 1] = np.arange(self.batch)
        sequences[:, 2] = 1
        sequences[:, 3] = self.context
        return PlanTables(
            page_size=self.page_size,
            num_qo_rows=self.batch,
            order=np.arange(self.batch, dtype=np.uint32),
            sequences=sequences,
            segment_order=np.arange(len(segments), dtype=np.uint32),
            segments=np.array(segments, dtype=np.uint32),
            page_ids=page_ids.astype(np.uint32),
        )

    def separate(self) -> Workload:
        """Return the step of as many tokens in which nothing is shared."""
        name = f"{self.name}, nothing shared"
        return replace(self, name=name, nodes=(self.batch,), tokens=(self.context,), goal=0.0)


def prompt(
    batch: int,
    heads: tuple[int, int],
    context: int,
    shared: int,
    goal: float = 0.0,
    page_size: int = 64,
) -> Workload:
    """Return sequences of `context` tokens whose first `shared` are common to all."""
    levels = [(1, shared), (batch, context - shared)]
    kept = [level for level in levels if level[1]]
    nodes, tokens = zip(*kept, strict=True)
    name = f"b{batch} {heads[0]}/{heads[1]} {context}/{shared}"
    return Workload(name, batch, *heads, nodes, tokens, page_size, goal)


#: The rows whose goals `README.md` speaks of.
ROWS = tuple(
    prompt(batch, heads, context, shared, goal)
    for batch, heads, context, shared, goal in (
        (32, (32, 32), 1024, 0, 124),
        (32, (32, 32), 1024, 512, 70),
        (32, (32, 32), 1024, 768, 39),
        (32, (32, 32), 1024, 1024, 8.0),
        (32, (32, 32), 2048, 0, 241),
        (32, (32, 32), 2048, 1024, 135),
        (32, (32, 32), 2048, 1536, 74),
        (32, (32, 32), 2048, 2048, 11.5),
        (32, (32, 32), 4096, 0, 476),
        (32, (32, 32), 4096, 2048, 260),
        (32, (32, 32), 4096, 3072, 145),
        (32, (32, 32), 4096, 4096, 19.7),
        (32, (32, 8), 4096, 0, 127),
        (32, (32, 8), 4096, 2048, 70),
        (32, (32, 8), 4096, 4096, 9.5),
        (16, (32, 32), 2112, 0, 127),
        (16, (32, 32), 2112, 2048, 15.5),
        (96, (32, 32), 2112, 0, 740),
        (96, (32, 32), 2112, 2048, 36),
        (64, (32, 8), 8448, 0, 496),
        (64, (32, 8), 8448, 8192, 33),
    )
)

HEAD_PAIRS = ((32, 32), (16, 8), (32, 8), (64, 8))

#: Nodes of each level and tokens of each node (the notation of flashserve/PAT).
TREES = (
    ((1, 10), (4096, 416)),
    ((1, 256), (256, 32)),
    ((1, 1024), (2048, 32)),
    ((1, 2, 64), (1024, 256, 256)),
    ((1, 4, 16, 512), (1024, 256, 128, 32)),
    ((2, 8, 16, 256), (256, 256, 32, 32)),
    ((256,), (1024,)),
    ((256,), (4096,)),
)


#: The same with K and V in fp8.
FP8_ROWS = tuple(
    replace(row, name=f"{row.name} fp8", goal=0.0, item_size=1)
    for row in ROWS
    if row.num_kv_heads == 8 or row.context == 4096
)


def tree(nodes: tuple[int, ...], tokens: tuple[int, ...], heads: tuple[int, int]) -> Workload:
    """Return one sequence for each leaf of a tree."""
    shape = f"{','.join(map(str, nodes))}_{','.join(map(str, tokens))}"
    name = f"{shape} {heads[0]}/{heads[1]}"
    return Workload(name, nodes[-1], *heads, nodes, tokens, page_size=32)
