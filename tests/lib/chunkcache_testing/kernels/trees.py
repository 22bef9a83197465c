"""Random forests, their plan tables and their K/V pages, and the answer in float64."""

from dataclasses import dataclass

import numpy as np
import torch

from chunkcache.kernels.work import NONE, PlanTables


@dataclass(frozen=True)
class Node:
    """A segment: tokens below a parent, and the sequences (queries, unseen keys) that end in it."""

    num_tokens: int
    children: tuple["Node", ...] = ()
    ends: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Forest:
    """Plan tables and, per sequence in `order`, its pages."""

    tables: PlanTables
    paths: list[list[int]]


def build(
    roots: list[Node], page_size: int, num_pages: int, rng: np.random.Generator, padding: int = 0
) -> Forest:
    """Lay a forest out over random pages; q rows in random order with `padding` rows among them."""
    free = list(rng.permutation(num_pages))
    segments: list[list[int]] = []
    page_ids: list[int] = []
    ends: list[tuple[int, int, int, list[int]]] = []  # leaf, qo_len, kv_len, pages
    stack = [(root, NONE, 0, []) for root in reversed(roots)]
    spans: dict[int, list[int]] = {}
    parents: list[int] = []
    while stack:
        node, parent, start, path = stack.pop()
        row = len(segments)
        pages = [int(free.pop()) for _ in range(-(-node.num_tokens // page_size))]
        segments.append([parent, 0, 0, start, len(pages), len(page_ids)])
        parents.append(parent)
        page_ids += pages
        for qo_len, unseen in node.ends:
            position = len(ends)
            ends.append((row, qo_len, start + node.num_tokens - unseen, path + pages))
            above = row
            while above != NONE:
                spans.setdefault(above, []).append(position)
                above = parents[above]
        for child in reversed(node.children):
            stack.append((child, row, start + node.num_tokens, path + pages))
    for row, covered in spans.items():
        segments[row][1], segments[row][2] = min(covered), max(covered) + 1
    num_rows = sum(end[1] for end in ends) + padding
    sequences = np.zeros((len(ends), 5), dtype=np.uint32)
    arrangement = rng.permutation(len(ends))  # the caller's order of the sequences
    begins = np.zeros(len(ends), dtype=np.int64)
    at = 0
    gaps = set(rng.permutation(len(ends))[:padding].tolist()) if padding else set()
    left = padding
    for place, position in enumerate(arrangement):
        if place in gaps and left:
            at += 1
            left -= 1
        begins[position] = at
        at += ends[position][1]
    rows = rng.permutation(len(ends)).astype(np.uint32)  # table row of each sequence
    for position, (leaf, qo_len, kv_len, _) in enumerate(ends):
        sequences[rows[position]] = [leaf, begins[position], qo_len, kv_len, 0]
    covered_rows = [row for row in range(len(segments)) if row in spans]
    return Forest(
        PlanTables(
            page_size=page_size,
            num_qo_rows=num_rows,
            order=rows,
            sequences=sequences,
            segment_order=np.array(covered_rows, dtype=np.uint32),
            segments=np.array(segments, dtype=np.uint32).reshape(-1, 6),
            page_ids=np.array(page_ids, dtype=np.uint32),
        ),
        [path for _, _, _, path in ends],
    )


def reference(
    forest: Forest,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sm_scale: float,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every row in float64; k and v `[pages, page_size, heads, d]`, any strides."""
    rows, num_qo_heads, d = q.shape
    group = num_qo_heads // k.shape[2]
    out = torch.zeros(rows, num_qo_heads, d, dtype=torch.float64, device=q.device)
    lse = torch.full((rows, num_qo_heads), -torch.inf, dtype=torch.float64, device=q.device)
    for position, path in enumerate(forest.paths):
        _, begin, qo_len, kv_len, _ = (
            int(x) for x in forest.tables.sequences[forest.tables.order[position]]
        )
        if qo_len == 0 or kv_len == 0:
            continue
        pages = torch.tensor(path, device=q.device)
        keys = k[pages].flatten(0, 1)[:kv_len].double().repeat_interleave(group, dim=1)
        values = v[pages].flatten(0, 1)[:kv_len].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,nhd->htn", q[begin : begin + qo_len].double(), keys) * sm_scale
        if logits_soft_cap > 0:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        at = torch.arange(kv_len - qo_len, kv_len, device=q.device)[:, None]
        key = torch.arange(kv_len, device=q.device)[None, :]
        seen = key <= at
        if window_left >= 0:
            seen &= key >= at - window_left
        scores = scores.masked_fill(~seen, -torch.inf)
        lse[begin : begin + qo_len] = torch.logsumexp(scores, dim=2).T
        out[begin : begin + qo_len] = torch.einsum("htn,nhd->thd", scores.softmax(2), values)
    return out, lse


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Largest max|x - ref| / max|ref| over tokens and heads; where ref is 0, max|x|."""
    difference = (out.double() - ref).abs().amax(-1)
    size = ref.abs().amax(-1)
    relative = torch.where(size > 0, difference / size.clamp_min(1e-300), difference)
    return float(relative.max()) if relative.numel() else 0.0
