"""The kernels on torch CUDA tensors: attention over any plan, K/V writes, merges of states.

Work goes to torch's current stream; nothing here synchronises with the device, but for the first
use of a plan that no planner made, whose tables are copied then. (Under CUDA-graph capture, use the
plan once before.)
"""

import struct
import sys
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from chunkcache._core import Plan
from chunkcache.errors import InvalidConfigError, StalePlanError
from chunkcache.kernels.costs import costs_of
from chunkcache.kernels.driver import Launch, load
from chunkcache.kernels.followed import followed_tables
from chunkcache.kernels.params import Operands, Scores, Strides
from chunkcache.kernels.scales import check_unused, head_scales
from chunkcache.kernels.table import find
from chunkcache.kernels.tensors import (
    ELEMENTS,
    KV_ELEMENTS,
    Wanted,
    as_tensor,
    check,
    check_aligned,
    dtype_name,
    stream_of,
)
from chunkcache.kernels.tpp import HEAD_DIMS, Pages, Tables, TppAttention, TppTables, best_path
from chunkcache.kernels.work import cut_plan, plan_tables

if TYPE_CHECKING:
    import torch

_HALVES = ("float16", "bfloat16")
_PAGES = tuple(KV_ELEMENTS)

_tables: WeakKeyDictionary[Plan, dict[TppAttention, TppTables]] = WeakKeyDictionary()


class PagedKv(NamedTuple):
    """K and V as views `[pages, page_size, num_kv_heads, head_dim]`.

    Of fp8, an element stands for what is stored times the scale of its head, float32
    `[num_kv_heads]`; None is 1.
    """

    k: "torch.Tensor"
    v: "torch.Tensor"
    k_scale: "torch.Tensor | None" = None
    v_scale: "torch.Tensor | None" = None

    @property
    def element(self) -> str:
        """Type of an element, as the kernels name it."""
        return KV_ELEMENTS[dtype_name(self.k)]

    @property
    def strides(self) -> tuple[Strides, Strides]:
        """Strides of K and of V."""
        size = self.k.element_size()
        k, v = (
            Strides(*(stride * size for stride in (x.stride(0), x.stride(2), x.stride(1))))
            for x in (self.k, self.v)
        )
        return k, v

    @property
    def scale_addresses(self) -> tuple[int, int]:
        """Where the scales are, 0 for none."""
        k, v = (0 if x is None else x.data_ptr() for x in (self.k_scale, self.v_scale))
        return k, v


class Options(NamedTuple):
    """How scores are made; see `chunkcache.attention.run`."""

    sm_scale: float | None
    logits_soft_cap: float | None
    window_left: int
    return_lse: bool


def paged_kv(
    k_pages: Any,
    v_pages: Any,
    kv_layout: str,
    device: int,
    k_scale: Any = None,
    v_scale: Any = None,
) -> PagedKv:
    """Check pages of K and V and view them tokens first.

    Args:
        k_pages: keys, or FlashInfer's combined `[pages, 2, ...]` if `v_pages` is None.
        v_pages: values or None.
        kv_layout: "NHD" or "HND".
        device: CUDA ordinal.
        k_scale: scales of keys in fp8; see `chunkcache.attention.run`.
        v_scale: scales of values.

    Raises:
        InvalidConfigError: pages that the kernels cannot read in place, or scales that are not
            theirs.
    """
    if kv_layout not in ("NHD", "HND"):
        raise InvalidConfigError(f"kv_layout: got {kv_layout!r}, allowed is 'NHD' or 'HND'")
    inner = ("page_size", "heads") if kv_layout == "NHD" else ("heads", "page_size")
    dims = ("pages", *inner, "head_dim")
    if v_pages is None:
        combined = ("pages", "2", *inner, "head_dim")
        both = check("k_pages", k_pages, Wanted(combined, (None, 2, *(None,) * 3), _PAGES, device))
        k, v = both[:, 0], both[:, 1]
    else:
        k = check("k_pages", k_pages, Wanted(dims, (None,) * 4, _PAGES, device))
        same = Wanted(dims, tuple(k.shape), (dtype_name(k),), device)
        v = check("v_pages", v_pages, same)
    for name, pages in (("k_pages", k), ("v_pages", v)):
        check_aligned(name, pages, 16)
    if kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    if k.shape[3] not in HEAD_DIMS:
        raise InvalidConfigError(f"head_dim: got {k.shape[3]}, allowed is {HEAD_DIMS}")
    check_unused(dtype_name(k), k_scale=k_scale, v_scale=v_scale)
    heads = k.shape[2]
    scales = (
        head_scales("k_scale", k_scale, heads, device),
        head_scales("v_scale", v_scale, heads, device),
    )
    return PagedKv(k, v, *scales)


def run(plan: Plan, q: Any, kv: PagedKv, options: Options, out: Any, lse: Any) -> Any:
    """Attention of a plan's rows; see `chunkcache.attention.run`.

    Args:
        plan: the step.
        q: queries `[rows, num_qo_heads, head_dim]`.
        kv: from `paged_kv`.
        options: scale, cap, window, and whether lse is returned.
        out: where the output goes, or None.
        lse: where the log-sum-exp goes, or None.

    Raises:
        InvalidConfigError: an argument that is not allowed.
        StalePlanError: the plan is closed.
        KernelError: the kernels could not be built or launched.
    """
    torch = sys.modules["torch"]
    with torch.cuda.device(kv.k.device):
        call = prepare(plan.num_rows, q, kv, options, out, lse)
        attention = attention_of(kv, call.q)
        stream = stream_of(attention.device)
        tables: Tables
        if (planner := plan.planner) is not None:
            followed = followed_tables(planner, attention.device)
            tables = followed.bring_to(planner, plan, attention, stream)
        else:
            tables = device_tables(plan, attention, stream)
        launch(attention, tables, kv, call, options)
    return call.result(options)


class Call(NamedTuple):
    """The checked tensors of one call."""

    q: "torch.Tensor"
    out: "torch.Tensor"
    lse: "torch.Tensor | None"

    def result(self, options: Options) -> Any:
        """Return out, or out and lse."""
        return (self.out, self.lse) if options.return_lse else self.out


def prepare(num_rows: int, q: Any, kv: PagedKv, options: Options, out: Any, lse: Any) -> Call:
    """Check the tensors of one call, and make those that were not given.

    Args:
        num_rows: rows of q.
        q: queries `[rows, num_qo_heads, head_dim]`.
        kv: from `paged_kv`.
        options: scale, cap, window, and whether lse is returned.
        out: where the output goes, or None.
        lse: where the log-sum-exp goes, or None.

    Raises:
        InvalidConfigError: an argument that is not allowed.
    """
    device, head_dim = kv.k.device.index, kv.k.shape[3]
    dims = ("rows", "num_qo_heads", "head_dim")
    allowed = _HALVES if kv.element == "E4M3" else (dtype_name(kv.k),)
    q = check("q", q, Wanted(dims, (num_rows, None, head_dim), allowed, device))
    check_aligned("q", q, 16)
    torch = sys.modules["torch"]
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out = check("out", out, Wanted(dims, tuple(q.shape), (dtype_name(q),), device))
    check_aligned("out", out, 8)
    if lse is None and options.return_lse:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if lse is not None:
        shape = Wanted(dims[:2], tuple(q.shape[:2]), ("float32",), device)
        lse = check("lse", lse, shape, contiguous=True)
    if options.window_left < -1:
        raise InvalidConfigError(
            f"window_left: got {options.window_left}, allowed is -1 (none) or more"
        )
    return Call(q, out, lse)


def attention_of(kv: PagedKv, q: "torch.Tensor") -> TppAttention:
    """Return the kernel for pages and checked queries, for the device's best path.

    Raises:
        InvalidConfigError: a head shape that no kernel was written for, or fp8 on a device that
            does not have it.
    """
    device = kv.k.device.index
    return TppAttention(
        device,
        ELEMENTS[dtype_name(q)],
        kv.element,
        q.shape[1],
        kv.k.shape[2],
        kv.k.shape[3],
        best_path(device, kv.element, "k_pages"),
    )


def launch(
    attention: TppAttention, tables: Tables, kv: PagedKv, call: Call, options: Options
) -> None:
    """Launch attention on torch's current stream.

    Args:
        attention: from `attention_of`.
        tables: the step's tables, cut for its heads.
        kv: from `paged_kv`.
        call: from `prepare`.
        options: scale, cap, window.

    Raises:
        KernelError: the kernels could not be built or launched.
    """
    q, out, lse = call
    scale = attention.head_dim**-0.5 if options.sm_scale is None else options.sm_scale
    attention.launch(
        tables,
        Pages(
            kv.k.data_ptr(),
            kv.v.data_ptr(),
            *kv.strides,
            kv.k.shape[0],
            kv.k.shape[1],
            *kv.scale_addresses,
        ),
        Operands(
            q=q.data_ptr(),
            q_row=q.stride(0),
            q_head=q.stride(1),
            out=out.data_ptr(),
            out_row=out.stride(0),
            out_head=out.stride(1),
            lse=0 if lse is None else lse.data_ptr(),
        ),
        Scores(scale, options.logits_soft_cap or 0.0, options.window_left),
        overlap=True,
    ).run(stream_of(attention.device))


def device_tables(plan: Plan, attention: TppAttention, stream: int) -> TppTables:
    """Return a plan's tables on the device, made at its first use for a head shape.

    Raises:
        StalePlanError: the plan is closed.
    """
    if not plan.is_open:
        raise StalePlanError("plan: got a closed one, allowed is an open plan")
    made = _tables.setdefault(plan, {})
    if attention not in made:
        costs = costs_of(attention.device).for_item_size(attention.item_size)
        schedule = cut_plan(plan, attention.heads, costs)
        tables = plan_tables(plan)
        made[attention] = TppTables(attention.device, tables, schedule, attention.head_dim, stream)
    return made[attention]


def write_kv(k: Any, v: Any, slot_mapping: Any, kv: PagedKv) -> None:
    """Write K and V of new tokens into their slots, converted to the pages' dtype.

    Pages of fp8 take them over their scales, to the nearest, ties to even; what is beyond 448
    becomes 448, and NaN stays NaN.

    Args:
        k: keys `[rows, num_kv_heads, head_dim]`, float32, float16 or bfloat16.
        v: values, shaped as k.
        slot_mapping: int64 `[rows]`, page * page_size + offset; rows below 0 are left out.
        kv: from `paged_kv`.

    Raises:
        InvalidConfigError: an argument that is not allowed.
    """
    device = kv.k.device.index
    dims = ("rows", "num_kv_heads", "head_dim")
    wanted = Wanted(("rows",), (None,), ("int64",), device)
    slots = check("slot_mapping", slot_mapping, wanted, contiguous=True)
    rows = slots.shape[0]
    k = check("k", k, Wanted(dims, (rows, *kv.k.shape[2:]), tuple(ELEMENTS), device))
    v = check("v", v, Wanted(dims, tuple(k.shape), (dtype_name(k),), device))
    check_aligned("k", k, 16)
    check_aligned("v", v, 16)
    if rows == 0:
        return
    params = struct.pack(
        "<2Q4q2Q6q3Q4I",
        k.data_ptr(),
        v.data_ptr(),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv.k.data_ptr(),
        kv.v.data_ptr(),
        *(step for strides in kv.strides for step in astuple(strides)),
        slots.data_ptr(),
        *kv.scale_addresses,
        k.shape[1],
        k.shape[2],
        kv.k.shape[1],
        0,
    )
    name = f"write_kv_{ELEMENTS[dtype_name(k)]}_{kv.element}".lower()
    arch = "compute_89" if kv.element == "E4M3" else "compute_80"
    Launch(load(find(name, arch), device, 0), rows, 128, 0, params).run(stream_of(device))


def merge_state(
    o_a: Any, lse_a: Any, o_b: Any, lse_b: Any
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Merge two states over disjoint keys; see `chunkcache.attention.merge_state`.

    Raises:
        InvalidConfigError: shapes, dtypes or devices that are not allowed.
    """
    o_a = as_tensor("o_a", o_a)
    device = o_a.device.index
    dims = ("rows", "num_qo_heads", "head_dim")
    o_a = check("o_a", o_a, Wanted(dims, (None,) * 3, tuple(ELEMENTS), device), contiguous=True)
    same = Wanted(dims, tuple(o_a.shape), (dtype_name(o_a),), device)
    o_b = check("o_b", o_b, same, contiguous=True)
    sums = Wanted(dims[:2], tuple(o_a.shape[:2]), ("float32",), device)
    lse_a = check("lse_a", lse_a, sums, contiguous=True)
    lse_b = check("lse_b", lse_b, sums, contiguous=True)
    torch = sys.modules["torch"]
    o, lse = torch.empty_like(o_a), torch.empty_like(lse_a)
    states = lse.numel()
    if states:
        params = struct.pack(
            "<7Q2I",
            *(x.data_ptr() for x in (o_a, lse_a, o_b, lse_b, o, lse)),
            states,
            o_a.shape[2],
            0,
        )
        name = f"merge_state_{ELEMENTS[dtype_name(o_a)]}".lower()
        grid = -(-states // 8)
        with torch.cuda.device(device):
            Launch(load(find(name), device, 0), grid, 256, 0, params).run(stream_of(device))
    return o, lse


class Arena(NamedTuple):
    """Our own pages: `[layers, chunks, 2, num_kv_heads, chunk_size, head_dim]`, contiguous."""

    pages: "torch.Tensor"

    def copy_chunk_heads(self, copies: list[tuple[int, int, int]]) -> None:
        """Copy, in all layers, the first tokens of chunks: `(src, dst, num_tokens)` each.

        Raises:
            InvalidConfigError: a chunk or a number of tokens beyond the arena's.
        """
        layers, chunks, _, heads, chunk_size, head_dim = self.pages.shape
        for src, dst, num_tokens in copies:
            if not (0 <= src < chunks and 0 <= dst < chunks and 0 <= num_tokens <= chunk_size):
                raise InvalidConfigError(
                    f"copies: got {(src, dst, num_tokens)}, allowed is chunks below {chunks} and up"
                    f" to {chunk_size} tokens"
                )
        if not copies:
            return
        torch = sys.modules["torch"]
        device = self.pages.device.index
        rows = np.zeros((len(copies), 4), dtype=np.int32)
        rows[:, :3] = copies
        on_device = torch.from_numpy(rows).pin_memory().to(self.pages.device, non_blocking=True)
        size = self.pages.element_size()
        params = struct.pack(
            "<2Q2q4I",
            self.pages.data_ptr(),
            on_device.data_ptr(),
            self.pages.stride(0) * size,
            self.pages.stride(1) * size,
            chunk_size * head_dim * size,
            head_dim * size,
            2 * heads,
            0,
        )
        function = load(find("copy_chunk"), device, 0)
        grid = (len(copies), layers * 2 * heads)
        Launch(function, grid, 128, 0, params).run(stream_of(device))
        on_device.record_stream(torch.cuda.current_stream(device))
