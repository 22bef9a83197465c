"""Attention over any plan, and the partial states that it is made of.

`run` attends over pages that others lay out (vLLM, SGLang, FlashInfer), for a plan that
`plan_from_block_tables` or `plan_from_csr` makes from their tables, or step after step a
`BlockTablePlanner`; prefixes that sequences share are found by equal leading page ids.
`ChunkCache.attend` does the same over its own K/V.

A partial result over some of the keys is a state `(o, lse)`: the normalised output and the natural
logarithm of the sum of the exponentials of the scores, after scale and cap, in float32. The state
over no keys is `(0, -inf)`. `merge_state` joins states over disjoint keys.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from chunkcache import _arrays, _core
from chunkcache._arrays import Expected, Tensor, View, view
from chunkcache._core import Plan
from chunkcache._types import Isa, KvLayout, Sharing
from chunkcache.block_tables import BlockTablePlanner as BlockTablePlanner
from chunkcache.block_tables import plan_from_block_tables as plan_from_block_tables
from chunkcache.block_tables import plan_from_csr as plan_from_csr
from chunkcache.errors import InvalidConfigError
from chunkcache.kernels import frontend, tensors
from chunkcache.kernels.scales import check_unused

_DTYPES = tuple(_arrays.ITEM_SIZES)


def available_isas() -> list[Isa]:
    """Return the instruction sets that kernels exist for and this processor has, fastest last."""
    return _core.available_isas()


def run(
    plan: Plan,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None = None,
    *,
    kv_layout: KvLayout = "NHD",
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    window_left: int = -1,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    num_threads: int | None = None,
    sharing: Sharing = "auto",
    isa: Isa | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Any:
    """Attention of a step's queries to pages of keys and values, in two phases.

    Arrays are numpy or torch on the CPU, all of one dtype (float32, float16 or bfloat16), in any
    strides but for a contiguous head_dim. Or all on one CUDA device, float16 or bfloat16, with
    pages of a multiple of 16 tokens: torch tensors, or arrays of other libraries that have DLPack's
    methods or a `__cuda_array_interface__`, taken without a copy. That needs
    `chunkcache[cuda,torch]` and works on torch's current stream; new outputs are torch tensors.
    There, from compute capability 8.9 on, pages may also be float8_e4m3fn, with float16 or bfloat16
    queries (vLLM's, which are uint8, after `pages.view(torch.float8_e4m3fn)`).

    Args:
        plan: the step.
        q: queries `[rows, num_qo_heads, head_dim]`; num_qo_heads is a multiple of num_kv_heads.
        k_pages: keys, `[pages, page_size, num_kv_heads, head_dim]` ("NHD") or
            `[pages, num_kv_heads, page_size, head_dim]` ("HND").
        v_pages: values, shaped as k_pages. None if `k_pages` is FlashInfer's combined array
            `[pages, 2, ...]` of keys and values.
        kv_layout: "NHD" or "HND".
        sm_scale: factor of the scores; 1/sqrt(head_dim) by default.
        logits_soft_cap: bound of the scores; None or 0 for none.
        window_left: how many keys before its own a query sees; -1 is all.
        out: where the output goes, shaped as q; a new array by default.
        lse: where the log-sum-exp goes, contiguous float32 `[rows, num_qo_heads]`.
        return_lse: whether to return it too.
        num_threads: threads; all cores by default. Results do not depend on it.
        sharing: which shared segments are read once for all their sequences: those for which the
            cost model says that it pays, "always" or "never".
        isa: the instruction set of the kernels; the best that the processor has by default.
        k_scale: what stored keys in fp8 are to be multiplied by: a number, or float32
            `[num_kv_heads]`; 1 by default. A tensor on the device costs no copy.
        v_scale: the same for values.

    Returns:
        out, of q's dtype and kind; with `return_lse`, out and lse.

    Raises:
        InvalidConfigError: an argument that is not allowed.
        StalePlanError: the plan is closed, or builds on one that was closed without a commit.
    """
    check_plan(plan)
    if tensors.is_cuda(q):
        if sharing != "auto" or isa is not None:
            given = f"sharing {_arrays.described(sharing)}, isa {_arrays.described(isa)}"
            raise InvalidConfigError(f"q: got a CUDA tensor with {given}, allowed is their default")
        on_device = tensors.as_tensor("q", q)
        device = on_device.device.index
        kv = frontend.paged_kv(k_pages, v_pages, kv_layout, device, k_scale, v_scale)
        how = frontend.Options(sm_scale, logits_soft_cap, window_left, return_lse)
        made = frontend.run(plan, on_device, kv, how, out, lse)
        if not return_lse:
            return made if out is None else out
        return tuple(
            mine if own is None else own for mine, own in zip(made, (out, lse), strict=True)
        )
    k, v = _pages(k_pages, v_pages, kv_layout)
    check_unused(k.dtype, k_scale=k_scale, v_scale=v_scale)
    queries = Expected(
        ("rows", "num_qo_heads", "head_dim"), (plan.num_rows, None, k.shape[3]), (k.dtype,)
    )
    arrays = outputs(q, queries, out, lse, return_lse)
    arrays.check_apart(k_pages=k, v_pages=v)
    options = (sm_scale, logits_soft_cap, window_left, sharing, isa)
    _core.run(plan, arrays.q, k, v, options, arrays.out, arrays.lse, num_threads)
    return arrays.result()


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    num_threads: int | None = None,
    isa: Isa | None = None,
) -> tuple[Any, Any]:
    """Attention of every query to all of some keys: the paper's `partial_attn`.

    Arrays are numpy or torch on the CPU, all of one dtype (float32, float16 or bfloat16), in any
    strides but for a contiguous head_dim.

    Args:
        q: queries `[rows, num_qo_heads, head_dim]`; num_qo_heads is a multiple of num_kv_heads.
        k: keys `[keys, num_kv_heads, head_dim]`.
        v: values, shaped as k.
        sm_scale: factor of the scores; 1/sqrt(head_dim) by default.
        logits_soft_cap: bound of the scores; None or 0 for none.
        out: where the output goes, shaped as q; a new array by default.
        lse: where the log-sum-exp goes, contiguous float32 `[rows, num_qo_heads]`.
        num_threads: threads; all cores by default. Results do not depend on it.
        isa: the instruction set of the kernels; the best that the processor has by default.

    Returns:
        The state `(o, lse)`, to merge with others; `(0, -inf)` without keys.

    Raises:
        InvalidConfigError: an argument that is not allowed.
    """
    keys = view("k", k, Expected(("keys", "num_kv_heads", "head_dim"), (None,) * 3, _DTYPES))
    values = view("v", v, Expected(("keys", "num_kv_heads", "head_dim"), keys.shape, (keys.dtype,)))
    queries = Expected(
        ("rows", "num_qo_heads", "head_dim"), (None, None, keys.shape[2]), (keys.dtype,)
    )
    arrays = outputs(q, queries, out, lse, return_lse=True)
    arrays.check_apart(k=keys, v=values)
    _core.partial_attention(
        arrays.q,
        keys,
        values,
        (sm_scale, logits_soft_cap, -1, "auto", isa),
        arrays.out,
        arrays.lse,
        num_threads,
    )
    state: tuple[Any, Any] = arrays.result()
    return state


def merge_state(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Any, Any]:
    """Merge two states over disjoint keys into the state over both: the paper's `attn_reduce`.

    Args:
        o_a: outputs `[rows, num_qo_heads, head_dim]`, float32, float16 or bfloat16.
        lse_a: their log-sum-exp, contiguous float32 `[rows, num_qo_heads]`.
        o_b: outputs of the other state, shaped as `o_a`.
        lse_b: their log-sum-exp.

    Returns:
        The state `(o, lse)`; o is of the dtype and kind of `o_a`.

    Raises:
        InvalidConfigError: shapes or dtypes that are not allowed.
    """
    if tensors.is_cuda(o_a):
        return frontend.merge_state(o_a, lse_a, o_b, lse_b)
    return _merged([(o_a, lse_a), (o_b, lse_b)], ("o_a", "lse_a", "o_b", "lse_b"))


def merge_states(o: Tensor, lse: Tensor) -> tuple[Any, Any]:
    """Merge any number of states over disjoint keys, in their order.

    Args:
        o: outputs `[states, rows, num_qo_heads, head_dim]`, float32, float16 or bfloat16.
        lse: their log-sum-exp, float32 `[states, rows, num_qo_heads]`.

    Returns:
        The state `(o, lse)`; o is of the dtype and kind of `o`.

    Raises:
        InvalidConfigError: shapes or dtypes that are not allowed, or no state at all.
    """
    dims = ("states", "rows", "num_qo_heads", "head_dim")
    outputs_ = view("o", o, Expected(dims, (None,) * 4, _DTYPES))
    view("lse", lse, Expected(dims[:3], outputs_.shape[:3], ("float32",)))
    count = outputs_.shape[0]
    if count == 0:
        raise InvalidConfigError("o: got no states, allowed is one or more")
    names = tuple(name for i in range(count) for name in (f"o[{i}]", f"lse[{i}]"))
    return _merged([(o[i], lse[i]) for i in range(count)], names)


def lse_to_base2(lse: Tensor) -> Any:
    """Convert natural logarithms to base 2, as FlashInfer's states have them.

    Args:
        lse: float32 of any shape, numpy or torch on any device.

    Raises:
        InvalidConfigError: lse is anything else.
    """
    return _checked_lse(lse) * np.float32(1 / np.log(2))


def lse_from_base2(lse: Tensor) -> Any:
    """Convert logarithms to base 2, as FlashInfer's states have them, to natural ones.

    Args:
        lse: float32 of any shape, numpy or torch on any device.

    Raises:
        InvalidConfigError: lse is anything else.
    """
    return _checked_lse(lse) * np.float32(np.log(2))


def lse_to_heads_first(lse: Tensor) -> Any:
    """Convert `[rows, num_qo_heads]` to vLLM's contiguous `[num_qo_heads, rows]`.

    Args:
        lse: float32, numpy or torch on any device.

    Raises:
        InvalidConfigError: lse is anything else, or of another number of dimensions.
    """
    return _transposed(lse, "[rows, num_qo_heads]")


def lse_from_heads_first(lse: Tensor) -> Any:
    """Convert vLLM's `[num_qo_heads, rows]` to contiguous `[rows, num_qo_heads]`.

    Args:
        lse: float32, numpy or torch on any device.

    Raises:
        InvalidConfigError: lse is anything else, or of another number of dimensions.
    """
    return _transposed(lse, "[num_qo_heads, rows]")


def check_plan(plan: Plan) -> None:
    """Refuse what is not a plan."""
    if not isinstance(plan, Plan):
        raise InvalidConfigError(f"plan: got {_arrays.described(plan)}, allowed is a Plan")


class Arrays(NamedTuple):
    """The views of a call's arrays, and what it returns."""

    q: View
    out: View
    lse: View | None
    out_array: Any
    lse_array: Any
    return_lse: bool

    def check_apart(self, **inputs: View) -> None:
        """Refuse outputs in the memory of further inputs, named by their arguments."""
        for name, found in inputs.items():
            _arrays.check_apart("out", self.out, name, found)
            if self.lse is not None:
                _arrays.check_apart("lse", self.lse, name, found)

    def result(self) -> Any:
        """Return out, or out and lse."""
        return (self.out_array, self.lse_array) if self.return_lse else self.out_array


def outputs(
    q: Tensor, expected: Expected, out: Tensor | None, lse: Tensor | None, return_lse: bool
) -> Arrays:
    """Check q and the outputs of attention, and make those that were not given.

    Args:
        q: the queries.
        expected: what they may be.
        out: the output, shaped as q, or None.
        lse: the log-sum-exp, or None.
        return_lse: whether lse is wanted.

    Raises:
        InvalidConfigError: arrays that are not allowed, or outputs that overlap q or each other.
    """
    return_lse = _arrays.flag("return_lse", return_lse)
    q_view = view("q", q, expected)
    rows, heads, _ = q_view.shape
    as_q = Expected(expected.dims, q_view.shape, (q_view.dtype,))
    out_array = _arrays.empty_like(q, q_view.shape) if out is None else out
    out_view = view("out", out_array, as_q, writable=True)
    lse_view, lse_array = None, lse
    if lse is None and return_lse:
        lse_array = _arrays.empty_like(q, (rows, heads), "float32")
    if lse_array is not None:
        as_lse = Expected(("rows", "num_qo_heads"), (rows, heads), ("float32",))
        lse_view = view("lse", lse_array, as_lse, writable=True, contiguous=True)
        _arrays.check_apart("lse", lse_view, "q", q_view)
        _arrays.check_apart("lse", lse_view, "out", out_view)
    _arrays.check_apart("out", out_view, "q", q_view)
    return Arrays(q_view, out_view, lse_view, out_array, lse_array, return_lse)


def _pages(k_pages: Tensor, v_pages: Tensor | None, kv_layout: str) -> tuple[View, View]:
    """Describe pages of keys and values as `[pages, heads, tokens, head_dim]`."""
    if not isinstance(kv_layout, str) or kv_layout not in ("NHD", "HND"):
        given = _arrays.described(kv_layout)
        raise InvalidConfigError(f"kv_layout: got {given}, allowed is 'NHD' or 'HND'")
    inner = ("page_size", "num_kv_heads") if kv_layout == "NHD" else ("num_kv_heads", "page_size")
    if v_pages is None:
        combined = Expected(
            ("pages", "2", *inner, "head_dim"), (None, 2, None, None, None), _DTYPES
        )
        both = view("k_pages", k_pages, combined)
        size = _arrays.ITEM_SIZES[both.dtype]
        shape, strides = (both.shape[0], *both.shape[2:]), (both.strides[0], *both.strides[2:])
        k = View(both.address, both.dtype, shape, strides)
        v = k._replace(address=both.address + both.strides[1] * size)
    else:
        k = view("k_pages", k_pages, Expected(("pages", *inner, "head_dim"), (None,) * 4, _DTYPES))
        as_k = Expected(("pages", *inner, "head_dim"), k.shape, (k.dtype,))
        v = view("v_pages", v_pages, as_k)
    return (_heads_first(k), _heads_first(v)) if kv_layout == "NHD" else (k, v)


def _heads_first(pages: View) -> View:
    page, token, head, dim = pages.strides
    num_pages, tokens, heads, head_dim = pages.shape
    return pages._replace(
        shape=(num_pages, heads, tokens, head_dim), strides=(page, head, token, dim)
    )


def _merged(states: Sequence[tuple[Any, Any]], names: Sequence[str]) -> tuple[Any, Any]:
    first = states[0][0]
    dims = ("rows", "num_qo_heads", "head_dim")
    shape = view(names[0], first, Expected(dims, (None,) * 3, _DTYPES)).shape
    views = []
    for (o, lse), o_name, lse_name in zip(states, names[::2], names[1::2], strict=True):
        as_lse = Expected(dims[:2], shape[:2], ("float32",))
        views.append(
            (
                view(o_name, o, Expected(dims, shape, _DTYPES)),
                view(lse_name, lse, as_lse, contiguous=True),
            )
        )
    o, lse = _arrays.empty_like(first, shape), _arrays.empty_like(first, shape[:2], "float32")
    as_o = Expected(dims, shape, _DTYPES)
    as_lse = Expected(dims[:2], shape[:2], ("float32",))
    _core.merge_states(views, view("o", o, as_o), view("lse", lse, as_lse))
    return o, lse


def _checked_lse(lse: Any, shape: str = "of any shape") -> Any:
    """Refuse what is no array or tensor of float32."""
    if not _arrays.is_dense(lse) or _arrays.dtype_name(lse.dtype) != "float32":
        given = _arrays.dtype_name(lse.dtype) if _arrays.is_dense(lse) else _arrays.described(lse)
        raise InvalidConfigError(
            f"lse: got {given}, allowed is a numpy array or a torch tensor, float32 {shape}"
        )
    return lse


def _transposed(lse: Any, shape: str) -> Any:
    """Return a contiguous transpose of the same kind."""
    if _checked_lse(lse, shape).ndim != 2:
        raise InvalidConfigError(f"lse: got {lse.ndim} dimensions, allowed is float32 {shape}")
    if isinstance(lse, np.ndarray):
        return np.ascontiguousarray(lse.T)
    return lse.T.contiguous()
