"""Values that are not finite reach the rows that see them, and no others."""

import pytest
import torch

from chunkcache_testing.kernels.device import FP8_PATHS, NEEDS_CUDA, PATHS
from chunkcache_testing.kernels.harness import TOLERANCE, Case, Prepared, prepare
from chunkcache_testing.kernels.trees import Node, error, reference

pytestmark = NEEDS_CUDA

COLUMN, HEAD = 21, 1
TYPES = [
    *[(path, element) for path in PATHS for element in ("F16", "BF16")],
    *[(path, "E4M3") for path in FP8_PATHS],
]


def seen_keys(prepared: Prepared, page: int, offset: int) -> torch.Tensor:
    """Which rows of q see a slot."""
    case, tables = prepared.case, prepared.forest.tables
    seen = torch.zeros(prepared.q.shape[0], dtype=torch.bool, device="cuda")
    for position, path in enumerate(prepared.forest.paths):
        if page not in path:
            continue
        key = path.index(page) * case.page_size + offset
        _, begin, qo_len, kv_len, _ = (int(x) for x in tables.sequences[tables.order[position]])
        at = torch.arange(kv_len - qo_len, kv_len, device="cuda")
        first = at - case.window_left if case.window_left >= 0 else torch.zeros_like(at)
        seen[begin : begin + qo_len] = (first <= key) & (key <= at)
    return seen


def check(case: Case, value: float, sequence: int, key: int) -> None:
    """Put a value into V at a key of a sequence, and look at all rows."""
    prepared = prepare(case)
    page, offset = prepared.forest.paths[sequence][key // case.page_size], key % case.page_size
    poison = prepared.v[page, offset, HEAD].float()
    poison[COLUMN] = value
    prepared.v[page, offset, HEAD] = poison.to(prepared.v.dtype)
    prepared.out.fill_(float("nan"))
    prepared.launch.run(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    seen = seen_keys(prepared, page, offset)
    assert seen.any()
    assert not seen.all()
    group = case.num_qo_heads // case.num_kv_heads
    heads = slice(HEAD * group, (HEAD + 1) * group)
    assert not prepared.out[seen, heads, COLUMN].isfinite().any()
    k, v = prepared.k.double(), prepared.v.double()
    if case.kv == "E4M3":
        k, v = k * prepared.k_scale[:, None].double(), v * prepared.v_scale[:, None].double()
    v[page, offset, HEAD, COLUMN] = 0
    ref, _ = reference(
        prepared.forest,
        prepared.q,
        k,
        v,
        sm_scale=case.head_dim**-0.5,
        window_left=case.window_left,
    )
    out = prepared.out.double()
    out[seen, heads, COLUMN] = ref[seen, heads, COLUMN]
    assert error(out, ref) <= TOLERANCE[case.kv]


def case_of(path: str, kv: str, roots: list[Node], **options: int) -> Case:
    element = "F16" if kv == "E4M3" else kv
    return Case(roots, path=path, element=element, kv_element=kv, **options)


@pytest.mark.parametrize(("path", "kv"), TYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("qo_len", [3, 16, 100])
def test_a_causal_edge(path, kv, head_dim, qo_len):
    roots = [Node(200, ends=((qo_len, 0),)), Node(qo_len, ends=((qo_len, 0),))]
    check(case_of(path, kv, roots, head_dim=head_dim), float("nan"), 0, 200 - qo_len // 2)


@pytest.mark.parametrize(("path", "kv"), TYPES)
@pytest.mark.parametrize("key", [230, 255, 256])
def test_a_window_edge_in_a_shared_segment(path, kv, key):
    tails = tuple(Node(n, ends=((1, 0),)) for n in (1, 20, 40, 45, 70))
    roots = [Node(512, tails)]
    check(case_of(path, kv, roots, window_left=300), float("nan"), 0, key)


@pytest.mark.parametrize(("path", "kv"), [(path, kv) for path, kv in TYPES if kv != "E4M3"])
@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_infinities(path, kv, value):
    check(case_of(path, kv, [Node(200, ends=((16, 0),))]), value, 0, 190)


@pytest.mark.parametrize(("path", "kv"), TYPES)
def test_the_last_token_of_a_longer_prompt(path, kv):
    roots = [Node(320, ends=((5, 0), (64, 30), (1, 100)))]
    check(case_of(path, kv, roots), float("nan"), 0, 300)
