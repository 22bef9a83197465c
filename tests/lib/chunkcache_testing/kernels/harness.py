"""Run two-phase attention over a forest on the GPU and compare with float64."""

from dataclasses import dataclass

import numpy as np
import torch

from chunkcache.kernels.driver import Launch
from chunkcache.kernels.params import Operands, Scores, Strides
from chunkcache.kernels.tpp import Pages, TppAttention, TppTables
from chunkcache.kernels.work import DeviceCosts, cut_tables
from chunkcache_testing.kernels.trees import Forest, Node, build, error, reference

TORCH_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "E4M3": torch.float8_e4m3fn}
#: The largest error by the type of K and V; against the dequantised reference for fp8.
TOLERANCE = {"F16": 1e-3, "BF16": 8e-3, "E4M3": 1e-2}
#: The same for most rows against float64 on what K and V were before they became fp8. Three bits of
#: mantissa leave a rounding of 2.4e-2 of each element's size, in K and again in V; where a row's
#: largest output happens to be small, that is more of it.
FP8_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Case:
    """One configuration."""

    roots: list[Node]
    num_qo_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    element: str = "F16"
    kv_element: str = ""
    page_size: int = 64
    layout: str = "HND"
    path: str = "sm_90"
    padding: int = 0
    logits_soft_cap: float = 0.0
    window_left: int = -1
    num_blocks: int = 132
    seed: int = 0
    q_size: float = 1.0
    kv_scale: float = 0.0

    @property
    def kv(self) -> str:
        """Type of K and V: that of q if none is given."""
        return self.kv_element or self.element


@dataclass
class Answer:
    """What a run gave, beside the reference."""

    out: torch.Tensor
    lse: torch.Tensor
    ref_out: torch.Tensor
    ref_lse: torch.Tensor
    true_out: torch.Tensor

    @property
    def true_errors(self) -> torch.Tensor:
        """Error of each row and head against K and V before they were converted."""
        difference = (self.out.double() - self.true_out).abs().amax(-1)
        return difference / self.true_out.abs().amax(-1)

    @property
    def out_error(self) -> float:
        return error(self.out, self.ref_out)

    @property
    def lse_error(self) -> float:
        if not torch.equal(torch.isneginf(self.lse), torch.isneginf(self.ref_lse)):
            return float("inf")
        difference = (self.lse.double() - self.ref_lse).abs()
        return float(torch.where(torch.isneginf(self.ref_lse), 0.0, difference).max())


def paged(
    layout: str, pages: int, page_size: int, heads: int, d: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as views `[pages, page_size, heads, d]` of a cache of some layout, full of NaN."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), device="cuda").to(dtype)

    if layout == "HND":
        both = empty(pages, 2, heads, page_size, d)
        return both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)
    if layout == "NHD":
        return empty(pages, page_size, heads, d), empty(pages, page_size, heads, d)
    both = empty(pages, 2, page_size, heads, d)
    return both[:, 0], both[:, 1]


@dataclass
class Prepared:
    """A launch and its operands, which live as long as this."""

    launch: Launch
    tables: TppTables
    forest: Forest
    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    true_k: torch.Tensor
    true_v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor

    def answer(self) -> Answer:
        """What the last launch gave; waits for it."""
        torch.cuda.synchronize()
        k, v = self.k.double(), self.v.double()
        if self.case.kv == "E4M3":
            k, v = k * self.k_scale[:, None].double(), v * self.v_scale[:, None].double()
        ref_out, ref_lse = self._reference(k, v)
        true_out, _ = self._reference(self.true_k, self.true_v)
        return Answer(self.out, self.lse, ref_out, ref_lse, true_out)

    def _reference(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return reference(
            self.forest,
            self.q,
            k,
            v,
            sm_scale=self.case.head_dim**-0.5 / self.case.q_size,
            logits_soft_cap=self.case.logits_soft_cap,
            window_left=self.case.window_left,
        )


def run(case: Case, repeats: int = 1) -> Answer:
    """Random inputs, poisoned outputs and unused K/V; the last of `repeats` equal launches."""
    prepared = prepare(case)
    for _ in range(repeats):
        prepared.out.fill_(float("nan"))
        prepared.lse.fill_(float("nan"))
        prepared.launch.run(torch.cuda.current_stream().cuda_stream)
    return prepared.answer()


def prepare(case: Case) -> Prepared:
    """Random inputs, NaN in the outputs and in K/V that no query sees."""
    rng = np.random.default_rng(case.seed)
    torch.manual_seed(case.seed)
    dtype = TORCH_TYPES[case.element]
    needed = _pages(case.roots, case.page_size)
    num_pages = needed + 3
    forest = build(case.roots, case.page_size, num_pages, rng, case.padding)
    sizes = (num_pages, case.page_size, case.num_kv_heads, case.head_dim)
    k, v = paged(case.layout, *sizes, TORCH_TYPES[case.kv])
    true_k, true_v = (torch.full_like(k, float("nan"), dtype=torch.float32) for _ in range(2))
    k_scale, v_scale = (
        case.kv_scale * (0.5 + torch.rand(case.num_kv_heads, device="cuda"))
        if case.kv_scale
        else torch.full((case.num_kv_heads,), 6 / 448, device="cuda")
        for _ in range(2)
    )
    for position, path in enumerate(forest.paths):
        kv_len = int(forest.tables.sequences[forest.tables.order[position], 3])
        for index, page in enumerate(path):
            here = min(kv_len - index * case.page_size, case.page_size)
            if here > 0:
                shape = (here, case.num_kv_heads, case.head_dim)
                true_k[page, :here] = torch.randn(shape, device="cuda")
                true_v[page, :here] = torch.randn(shape, device="cuda")
    for pages, true, scale in ((k, true_k, k_scale), (v, true_v, v_scale)):
        meant = (true / scale[:, None]).clamp(-448, 448) if case.kv == "E4M3" else true
        pages.copy_(meant)
    rows = forest.tables.num_qo_rows
    # Rows of a wider tensor: q and the output are strided.
    q = torch.randn(rows, case.num_qo_heads + 1, case.head_dim, device="cuda") * case.q_size
    q = q.to(dtype)[:, 1:]
    out = torch.full_like(q, float("nan"))
    lse = torch.full((rows, case.num_qo_heads), float("nan"), device="cuda")
    device = torch.cuda.current_device()
    stream = torch.cuda.current_stream().cuda_stream
    attention = TppAttention(
        device,
        case.element,
        case.kv,
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        case.path,
    )
    schedule = cut_tables(forest.tables, attention.heads, DeviceCosts(num_blocks=case.num_blocks))
    tables = TppTables(device, forest.tables, schedule, case.head_dim, stream)
    scale = case.head_dim**-0.5 / case.q_size
    size = k.element_size()
    k_strides, v_strides = (
        Strides(page=x.stride(0) * size, head=x.stride(2) * size, token=x.stride(1) * size)
        for x in (k, v)
    )
    scales = (k_scale.data_ptr(), v_scale.data_ptr()) if case.kv == "E4M3" else (0, 0)
    launch = attention.launch(
        tables,
        Pages(k.data_ptr(), v.data_ptr(), k_strides, v_strides, num_pages, case.page_size, *scales),
        Operands(
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
            lse.data_ptr(),
        ),
        Scores(scale, case.logits_soft_cap, case.window_left),
    )
    return Prepared(
        launch, tables, forest, case, q, k, v, out, lse, true_k, true_v, k_scale, v_scale
    )


def _pages(roots: list[Node], page_size: int) -> int:
    total, stack = 0, list(roots)
    while stack:
        node = stack.pop()
        total += -(-node.num_tokens // page_size)
        stack += node.children
    return total
