"""The kernels on torch tensors: foreign pages, K/V writes, copies and merges."""

import numpy as np
import pytest
import torch

from chunkcache import InvalidConfigError, StalePlanError, attention
from chunkcache.kernels import frontend
from chunkcache_testing.kernels.device import NEEDS_CUDA
from chunkcache_testing.kernels.harness import paged
from chunkcache_testing.kernels.trees import error

pytestmark = NEEDS_CUDA


def block_tables(batch: int, shared: int, private: int) -> np.ndarray:
    rng = np.random.default_rng(batch)
    pages = rng.permutation(shared + batch * private + 2)
    tails = pages[shared : shared + batch * private].reshape(batch, private)
    return np.concatenate([np.broadcast_to(pages[:shared], (batch, shared)), tails], axis=1)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_run_over_block_tables(layout, dtype):
    page_size, heads, d = 16, 2, 64
    table = block_tables(6, 5, 3)
    lengths = np.array([81, 100, 128, 97, 113, 82])
    shape = (int(table.max()) + 1, page_size, heads, d)
    k, v = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    q = torch.randn(6, 8, d, device="cuda").to(dtype)
    plan = attention.plan_from_block_tables(table, lengths, page_size)
    pages = [x.transpose(1, 2).contiguous() if layout == "HND" else x for x in (k, v)]
    out, lse = attention.run(plan, q, *pages, kv_layout=layout, return_lse=True)
    cpu = [x.float().cpu() for x in (q, k, v)]
    ref, ref_lse = attention.run(plan, cpu[0], cpu[1], cpu[2], kv_layout="NHD", return_lse=True)
    assert error(out.cpu(), ref.double()) < (1e-3 if dtype == torch.float16 else 8e-3)
    assert float((lse.cpu() - ref_lse).abs().max()) < 1e-2


@pytest.mark.parametrize("only_grew", [False, True])
def test_run_over_block_tables_that_grow(only_grew):
    page_size, heads, d = 16, 2, 64
    table = block_tables(6, 5, 6)
    lengths = np.array([81, 100, 120, 97, 113, 82])
    shape = (int(table.max()) + 1, page_size, heads, d)
    k, v = (torch.randn(shape, device="cuda").half() for _ in range(2))
    planner = attention.BlockTablePlanner(page_size)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for step in range(40):
        q = torch.randn(6, 8 if step < 30 else 4, d, device="cuda").half()
        plan = planner.plan(table, lengths + step, only_grew=only_grew)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[step // 3 % 2]):
            out = attention.run(plan, q, k, v)
            again = attention.run(plan, q, k, v)
        torch.cuda.synchronize()
        assert torch.equal(out, again)
        cpu = [x.float().cpu() for x in (q, k, v)]
        ref = attention.run(attention.plan_from_block_tables(table, lengths + step, 16), *cpu)
        assert error(out.cpu(), ref.double()) < 1e-3


def test_a_closed_plan_is_refused():
    plan = attention.plan_from_block_tables(np.array([[0]]), np.array([3]), 16)
    k = torch.zeros(1, 16, 1, 64, dtype=torch.float16, device="cuda")
    plan.close()
    with pytest.raises(StalePlanError):
        attention.run(plan, k[0, :1], k, k)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.float32}, "q: got float32"),
        ({"k": 8}, "page_size: got 8"),
        ({"v": "cpu"}, "v_pages: got cpu"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    size = change.get("k", 16)
    plan = attention.plan_from_block_tables(np.array([[0]]), np.array([3]), size)
    k = torch.zeros(1, size, 1, 64, dtype=torch.float16, device="cuda")
    v = k.to(change.get("v", "cuda"))
    q = torch.zeros(1, 1, 64, dtype=change.get("q", torch.float16), device="cuda")
    with pytest.raises(InvalidConfigError, match=message):
        attention.run(plan, q, k, v)


def test_a_captured_run_replays():
    table = block_tables(4, 3, 1)
    k = torch.randn(int(table.max()) + 1, 16, 2, 128, device="cuda").half()
    q = torch.randn(4, 4, 128, device="cuda").half()
    plan = attention.plan_from_block_tables(table, np.full(4, 60), 16)
    eager = attention.run(plan, q, k, k)
    out = torch.full_like(q, float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(plan, q, k, k, out=out)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, eager)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_write_kv(source, layout):
    k_pages, v_pages = paged(layout, 4, 16, 3, 80, torch.float16)
    kv = frontend.PagedKv(k_pages, v_pages)
    k, v = (torch.randn(5, 3, 80, device="cuda").to(source) for _ in range(2))
    slots = torch.tensor([17, -1, 63, 0, 5], device="cuda")
    frontend.write_kv(k, v, slots, kv)
    for pages, rows in ((k_pages, k), (v_pages, v)):
        flat = pages.reshape(-1, 3, 80)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert torch.equal(flat[slot], rows[row].half())
        assert int(flat.isnan().all(dim=(1, 2)).sum()) == 60


def test_copy_chunk_heads():
    pages = torch.randn(3, 5, 2, 2, 16, 64, device="cuda").half()
    wanted = pages.clone()
    wanted[:, 4, :, :, :7] = pages[:, 1, :, :, :7]
    wanted[:, 0] = pages[:, 2]
    frontend.Arena(pages).copy_chunk_heads([(1, 4, 7), (2, 0, 16)])
    assert torch.equal(pages, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_merge_state(dtype):
    o_a, o_b = (torch.randn(9, 4, 72, device="cuda").to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(9, 4, device="cuda") * 5 for _ in range(2))
    lse_a[0] = lse_b[1] = -torch.inf
    lse_a[2] = lse_b[2] = -torch.inf
    o_a[0] = o_b[1] = torch.nan
    o, lse = attention.merge_state(o_a, lse_a, o_b, lse_b)
    assert torch.equal(o[0], o_b[0])
    assert torch.equal(o[1], o_a[1])
    assert not o[2].any()
    assert torch.isneginf(lse[2]).all()
    ref = torch.logaddexp(lse_a.double(), lse_b.double())
    assert float((lse[3:] - ref[3:]).abs().max()) < 1e-5
    weight = torch.exp(lse_a.double() - ref)[3:, :, None]
    merged = weight * o_a[3:].double() + (1 - weight) * o_b[3:].double()
    assert float((o[3:] - merged).abs().max()) < (1e-5 if dtype == torch.float32 else 2e-2)
