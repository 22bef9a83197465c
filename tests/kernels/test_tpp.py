"""Two-phase attention on the GPU, both paths, against float64."""

import dataclasses

import numpy as np
import pytest
import torch

from chunkcache_testing.kernels.device import NEEDS_CUDA, PATHS
from chunkcache_testing.kernels.harness import TOLERANCE, Case, prepare, run
from chunkcache_testing.kernels.trees import Node

pytestmark = NEEDS_CUDA


def two_levels(shared: int, tails: list[int], qo_len: int = 1) -> list[Node]:
    return [Node(shared, tuple(Node(t, ends=((qo_len, 0),)) for t in tails))]


def check(case: Case) -> None:
    answer = run(case)
    assert answer.out_error <= TOLERANCE[case.element]
    assert answer.lse_error <= (1e-3 if case.element == "F16" else 1e-2)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("element", ["F16", "BF16"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_every_type_and_head_dim(path, element, head_dim):
    tails = [1, 33, 64, 100, 257]
    check(Case(two_levels(512, tails), head_dim=head_dim, element=element, path=path, padding=2))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads"),
    [(1, 1), (5, 1), (6, 2), (7, 7), (32, 8), (14, 2), (12, 3), (40, 40), (64, 1), (71, 1)],
)
def test_every_ratio(path, num_qo_heads, num_kv_heads):
    check(
        Case(
            two_levels(256, [40, 1, 300]),
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            path=path,
        )
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", ["HND", "NHD", "NHD combined"])
@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128, 256])
def test_every_layout_and_page_size(path, layout, page_size):
    shared = 3 * page_size
    check(Case(two_levels(shared, [5, 90, 31]), layout=layout, page_size=page_size, path=path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("window_left", [-1, 0, 10, 100, 700])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_window_and_cap(path, window_left, cap):
    case = Case(two_levels(512, [1, 70, 129, 600]), path=path)
    check(dataclasses.replace(case, window_left=window_left, logits_soft_cap=cap))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("qo_len", [1, 2, 5, 16, 64, 200])
@pytest.mark.parametrize("window_left", [-1, 77])
def test_several_queries_are_causal(path, qo_len, window_left):
    roots = two_levels(320, [qo_len, qo_len + 64, qo_len + 300], qo_len)
    check(Case(roots, path=path, window_left=window_left))


@pytest.mark.parametrize("path", PATHS)
def test_prefill_ends_inside_a_shared_segment(path):
    roots = [Node(640, ends=((40, 0), (100, 128), (1, 300), (3, 500)))]
    check(Case(roots, path=path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("batch", [1, 2, 3, 17, 64, 129, 257])
def test_batches(path, batch):
    rng = np.random.default_rng(batch)
    tails = [int(n) for n in rng.integers(1, 90, batch)]
    check(Case(two_levels(192, tails), path=path, padding=batch // 3))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_blocks", [1, 132, 500])
def test_deep_trees_and_several_roots(path, num_blocks):
    def subtree(depth: int) -> Node:
        if depth == 0:
            return Node(77, ends=((1, 0),))
        children = tuple(subtree(depth - 1) for _ in range(2))
        return Node(64 * depth, children, ends=((1, 0),) if depth % 2 else ())

    roots = [subtree(4), Node(300, ends=((1, 0),)), subtree(2)]
    check(Case(roots, path=path, num_blocks=num_blocks))


@pytest.mark.parametrize("path", PATHS)
def test_same_plan_twice_gives_the_same_bits(path):
    case = Case(two_levels(2048, [64, 500, 1, 3] * 8), path=path, num_qo_heads=32, num_kv_heads=8)
    first, again = run(case, repeats=1), run(case, repeats=5)
    assert torch.equal(first.out, again.out)
    assert torch.equal(first.lse, again.lse)


@pytest.mark.parametrize("path", PATHS)
def test_launches_on_two_streams_do_not_wait_for_each_other(path):
    roots = two_levels(2048, [64, 500, 1, 3] * 8)
    cases = [Case(roots, path=path, seed=seed, num_qo_heads=32) for seed in (1, 2)]
    prepared = [prepare(case) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1)]
    for _ in range(100):
        for each, stream in zip(prepared, streams, strict=True):
            each.launch.run(stream.cuda_stream)
    for each in prepared:
        assert each.answer().out_error <= TOLERANCE["F16"]


@pytest.mark.parametrize("path", PATHS)
def test_padding_rows_and_no_sequences(path):
    answer = run(Case([], path=path, padding=0))
    assert answer.out.numel() == 0


@pytest.mark.parametrize("path", PATHS)
def test_long_context(path):
    check(Case(two_levels(100_032, [100, 3]), path=path))
