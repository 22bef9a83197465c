"""Two-phase attention over K and V in fp8, against float64 on what they stand for."""

import dataclasses

import numpy as np
import pytest
import torch

from chunkcache import InvalidConfigError, attention, reference
from chunkcache.kernels import frontend
from chunkcache_testing.kernels.device import NEEDS_FP8
from chunkcache_testing.kernels.harness import FP8_TOLERANCE, TOLERANCE, Case, run
from chunkcache_testing.kernels.trees import Node, error

pytestmark = NEEDS_FP8

FP8 = torch.float8_e4m3fn


def two_levels(shared: int, tails: list[int], qo_len: int = 1) -> list[Node]:
    return [Node(shared, tuple(Node(t, ends=((qo_len, 0),)) for t in tails))]


def check(case: Case) -> None:
    answer = run(dataclasses.replace(case, path="sm_89", kv_element="E4M3"))
    assert answer.out_error <= TOLERANCE["E4M3"]
    assert answer.lse_error <= 1e-2


@pytest.mark.parametrize("element", ["F16", "BF16"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("qo_len", [1, 9])
def test_every_type_and_head_dim(element, head_dim, qo_len):
    roots = two_levels(512, [9, 33, 64, 100, 257], qo_len)
    check(Case(roots, head_dim=head_dim, element=element, padding=2, kv_scale=0.02))


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads"),
    [(1, 1), (5, 1), (6, 2), (7, 7), (32, 8), (14, 2), (12, 3), (40, 40), (64, 1), (71, 1)],
)
def test_every_ratio(num_qo_heads, num_kv_heads):
    heads = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads}
    check(Case(two_levels(256, [40, 1, 300]), **heads, element="BF16", kv_scale=0.05))


@pytest.mark.parametrize("layout", ["HND", "NHD", "NHD combined"])
@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128, 256])
def test_every_layout_and_page_size(layout, page_size):
    check(Case(two_levels(3 * page_size, [5, 90, 31]), layout=layout, page_size=page_size))


@pytest.mark.parametrize("window_left", [-1, 0, 10, 100, 700])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_window_and_cap(window_left, cap):
    case = Case(two_levels(512, [1, 70, 129, 600]), window_left=window_left, logits_soft_cap=cap)
    check(dataclasses.replace(case, element="BF16" if cap else "F16"))


@pytest.mark.parametrize("qo_len", [1, 2, 5, 16, 64, 200])
@pytest.mark.parametrize("window_left", [-1, 77])
def test_several_queries_are_causal(qo_len, window_left):
    roots = two_levels(320, [qo_len, qo_len + 64, qo_len + 300], qo_len)
    check(Case(roots, window_left=window_left))


def test_prefill_ends_inside_a_shared_segment():
    check(Case([Node(640, ends=((40, 0), (100, 128), (1, 300), (3, 500)))]))


@pytest.mark.parametrize("batch", [1, 2, 3, 17, 64, 129, 257])
def test_batches(batch):
    rng = np.random.default_rng(batch)
    tails = [int(n) for n in rng.integers(1, 90, batch)]
    check(Case(two_levels(192, tails), padding=batch // 3))


@pytest.mark.parametrize("num_blocks", [1, 132, 500])
def test_deep_trees_and_several_roots(num_blocks):
    def subtree(depth: int) -> Node:
        if depth == 0:
            return Node(77, ends=((1, 0),))
        children = tuple(subtree(depth - 1) for _ in range(2))
        return Node(64 * depth, children, ends=((1, 0),) if depth % 2 else ())

    roots = [subtree(4), Node(300, ends=((1, 0),)), subtree(2)]
    check(Case(roots, num_blocks=num_blocks))


def test_same_plan_twice_gives_the_same_bits():
    roots = two_levels(2048, [64, 500, 1, 3] * 8)
    case = Case(roots, path="sm_89", kv_element="E4M3", num_qo_heads=32, num_kv_heads=8)
    first, again = run(case, repeats=1), run(case, repeats=5)
    assert torch.equal(first.out, again.out)
    assert torch.equal(first.lse, again.lse)


def test_no_sequences():
    assert run(Case([], path="sm_89", kv_element="E4M3")).out.numel() == 0


def test_long_context():
    check(Case(two_levels(100_032, [100, 3])))


@pytest.mark.parametrize("q_size", [2.0**-100, 1e-12, 1e10, 2.0**90])
@pytest.mark.parametrize("head_dim", [112, 128])
def test_bf16_queries_beyond_the_range_of_f16(q_size, head_dim):
    roots = two_levels(128, [5, 90, 31])
    check(Case(roots, element="BF16", q_size=q_size, head_dim=head_dim, num_qo_heads=14))


@pytest.mark.parametrize("shared", [64, 2048])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_conversion_costs(shared, head_dim):
    roots = two_levels(shared, [30, 64, 500])
    case = Case(roots, path="sm_89", kv_element="E4M3", head_dim=head_dim)
    assert float(run(case).true_errors.median()) <= FP8_TOLERANCE


def pages_of(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale[:, None]).to(FP8)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", ["tensor", "numpy", "number", "none"])
def test_run_over_block_tables(layout, dtype, given):
    table = np.array([[3, 1, 4], [3, 1, 5], [3, 2, 0]])
    lengths = np.array([33, 40, 48])
    scale = torch.full((2,), 1.0 if given == "none" else 0.5, device="cuda")
    if given in ("tensor", "numpy"):
        scale[1] = 0.125
    k, v = (pages_of(torch.randn(6, 16, 2, 64, device="cuda"), scale) for _ in range(2))
    q = torch.randn(3, 8, 64, device="cuda").to(dtype)
    scales = {"tensor": scale, "numpy": scale.cpu().numpy(), "number": 0.5, "none": None}[given]
    pages = [x.transpose(1, 2).contiguous() if layout == "HND" else x for x in (k, v)]
    plan = attention.plan_from_block_tables(table, lengths, 16)
    out, lse = attention.run(
        plan, q, *pages, kv_layout=layout, return_lse=True, k_scale=scales, v_scale=scales
    )
    assert out.dtype == dtype
    meant = [(x.float() * scale[:, None]).cpu() for x in (k, v)]
    ref, ref_lse = attention.run(plan, q.float().cpu(), *meant, return_lse=True)
    assert error(out.cpu(), ref.double()) <= TOLERANCE["E4M3"]
    assert float((lse.cpu() - ref_lse).abs().max()) < 1e-2


def test_combined_pages():
    pages = torch.randn(4, 2, 16, 1, 128, device="cuda").to(FP8)
    q = torch.randn(1, 4, 128, device="cuda").half()
    plan = attention.plan_from_block_tables(np.array([[2, 1]]), np.array([20]), 16)
    out = attention.run(plan, q, pages)
    assert torch.equal(out, attention.run(plan, q, pages[:, 0], pages[:, 1]))


def one_page(**changes):
    """The arguments of a run over one page, some of them others."""
    k = torch.zeros(1, 16, 2, 64, device="cuda").to(FP8)
    q = torch.zeros(1, 2, 64, dtype=torch.float16, device="cuda")
    return {"q": q, "k_pages": k, "v_pages": k, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.float32}, r"q: got float32 .*allowed is float16 or bfloat16 \[1,"),
        ({"q": FP8}, r"q: got float8_e4m3fn .*allowed is float16 or bfloat16 \[1,"),
        ({"v_pages": torch.float16}, "v_pages: got float16 .*allowed is float8_e4m3fn"),
        ({"k_pages": torch.float8_e5m2}, "k_pages: got float8_e5m2"),
        ({"k_scale": [3]}, r"k_scale: got float32 \[3\] on cuda:0, allowed is float32 \[2\]"),
        ({"v_scale": -1.0}, r"v_scale: got a scale of -1\.0, allowed are finite ones above 0"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    arguments = one_page()
    for name, change in changes.items():
        if isinstance(change, torch.dtype):
            change = arguments[name].float().to(change)
        elif isinstance(change, list):
            change = torch.ones(change, device="cuda")
        arguments[name] = change
    plan = attention.plan_from_block_tables(np.array([[0]]), np.array([3]), 16)
    with pytest.raises(InvalidConfigError, match=message):
        attention.run(plan, **arguments)


def test_scales_of_pages_that_have_none_are_refused():
    k = torch.zeros(1, 16, 2, 64, dtype=torch.float16, device="cuda")
    plan = attention.plan_from_block_tables(np.array([[0]]), np.array([3]), 16)
    with pytest.raises(InvalidConfigError, match=r"k_scale: got 2\.0 for K and V of float16"):
        attention.run(plan, k[0, :1], k, k, k_scale=2.0)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_write_kv_converts_as_the_reference(source, layout):
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    k = patterns.view(torch.bfloat16 if source != torch.float16 else source).to(source)
    k = k.reshape(-1, 2, 64).cuda()
    v = k.flip(0)
    rows = k.shape[0]
    sizes = (rows // 16 + 1, 16, 2, 64) if layout == "NHD" else (rows // 16 + 1, 2, 16, 64)
    pages = [torch.full(sizes, 0x7F, dtype=torch.uint8, device="cuda") for _ in range(2)]
    scale = torch.tensor([0.37, 64.0], device="cuda")
    views = [x.view(FP8) if layout == "NHD" else x.view(FP8).transpose(1, 2) for x in pages]
    slots = torch.arange(rows, device="cuda").flip(0)
    slots[3] = -1
    frontend.write_kv(k, v, slots, frontend.PagedKv(*views, scale, scale))
    for x, found in ((k, pages[0]), (v, pages[1])):
        tokens = found if layout == "NHD" else found.transpose(1, 2)
        tokens = tokens.reshape(-1, 2, 64).cpu().numpy()
        expected = reference.quantise_fp8(x.float().cpu().numpy(), scale.cpu().numpy())
        for row in range(rows):
            got = tokens[rows - 1 - row]
            assert np.array_equal(got, np.full_like(got, 0x7F) if row == 3 else expected[row])
