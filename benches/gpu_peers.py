"""FlashInfer's ways to compute a step, where it is installed (https://github.com/flashinfer-ai)."""

from __future__ import annotations

import importlib
import sys
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from gpu_contenders import Inputs
from gpu_timing import Contender
from gpu_workloads import HEAD_DIM, Workload

WORKSPACE_BYTES = 256 * 2**20


@cache
def flashinfer() -> ModuleType | None:
    """Return the module, None where it is not installed."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError:
        return None


def _ints(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))


def _last_page_len(tokens: int, page_size: int) -> int:
    return (tokens - 1) % page_size + 1


class Csr:
    """FlashInfer's page table of some sequences or nodes.

    All but the pages is on the host, where `plan` wants it.

    Attributes:
        indptr: `[rows + 1]`.
        indices: page numbers.
        last_page_len: `[rows]`.
    """

    def __init__(self, pages: np.ndarray[Any, Any], tokens: int, page_size: int) -> None:
        """Lay out `pages [rows, pages]` of `tokens` tokens a row."""
        rows, width = pages.shape
        self.indptr = _ints(np.arange(rows + 1) * width)
        self.indices = _ints(pages.reshape(-1)).cuda()
        self.last_page_len = _ints(np.full(rows, _last_page_len(tokens, page_size)))


def sequences(work: Workload) -> Csr:
    """Return the pages of whole sequences."""
    return Csr(work.block_table(), work.context, work.page_size)


@cache
def _workspace(name: str) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


@cache
def decode_wrapper(use_tensor_cores: bool, workspace: str = "decode") -> Any:
    """Return the wrapper that decodes over page tables."""
    library: Any = flashinfer()
    return library.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(workspace), "HND", use_tensor_cores=use_tensor_cores
    )


@cache
def _prefill_wrapper(place: int) -> Any:
    library: Any = flashinfer()
    return library.BatchPrefillWithPagedKVCacheWrapper(_workspace("prefill"), "HND", backend="fa2")


@cache
def cascade_wrapper(num_levels: int) -> Any:
    """Return the wrapper of a tree, with the backend that it chooses itself."""
    library: Any = flashinfer()
    return library.MultiLevelCascadeAttentionWrapper(num_levels, _workspace("prefill"), "HND")


def plan_decode(wrapper: Any, csr: Csr, work: Workload) -> None:
    """Plan a decode step."""
    wrapper.plan(
        csr.indptr,
        csr.indices,
        csr.last_page_len,
        work.num_qo_heads,
        work.num_kv_heads,
        HEAD_DIM,
        work.page_size,
        q_data_type=torch.float16,
    )


def decode(inputs: Inputs, *, use_tensor_cores: bool) -> Contender:
    """Return its decode attention over pages, each sequence with all of its own."""
    wrapper = decode_wrapper(use_tensor_cores)
    plan_decode(wrapper, sequences(inputs.work), inputs.work)
    out = torch.full_like(inputs.q, torch.nan)
    return Contender([partial(wrapper.run, inputs.q, copy, out=out) for copy in inputs.pages], out)


def tree_levels(work: Workload) -> list[tuple[torch.Tensor, Csr]]:
    """Return the query rows and the pages of each level's nodes."""
    levels = []
    for level, nodes in enumerate(work.nodes):
        begins = np.searchsorted(work.node_of(level), np.arange(nodes + 1))
        csr = Csr(work.level_pages(level), work.tokens[level], work.page_size)
        levels.append((_ints(begins), csr))
    return levels


def plan_cascade(wrapper: Any, levels: list[tuple[torch.Tensor, Csr]], work: Workload) -> None:
    """Plan a step over a tree."""
    wrapper.plan(
        [begins for begins, _ in levels],
        [csr.indptr for _, csr in levels],
        [csr.indices for _, csr in levels],
        [csr.last_page_len for _, csr in levels],
        work.num_qo_heads,
        work.num_kv_heads,
        HEAD_DIM,
        work.page_size,
        q_data_type=torch.float16,
    )


def cascade(inputs: Inputs) -> Contender:
    """Return its attention over a tree, a launch for each level, as it comes."""
    work = inputs.work
    wrapper = cascade_wrapper(len(work.nodes))
    plan_cascade(wrapper, tree_levels(work), work)
    out = wrapper.run(inputs.q, inputs.pages[0])
    return Contender([partial(wrapper.run, inputs.q, copy) for copy in inputs.pages], out)


def _plan_prefill(wrapper: Any, level: tuple[torch.Tensor, Csr], work: Workload) -> None:
    begins, csr = level
    wrapper.plan(
        begins,
        csr.indptr,
        csr.indices,
        csr.last_page_len,
        work.num_qo_heads,
        work.num_kv_heads,
        HEAD_DIM,
        work.page_size,
        causal=False,
        q_data_type=torch.float16,
    )


def cascade_fa2(inputs: Inputs) -> Contender:
    """Return the same with FlashAttention-2 kernels, which it does not choose on Hopper."""
    library: Any = flashinfer()
    work, q = inputs.work, inputs.q
    wrappers = [_prefill_wrapper(place) for place in range(len(work.nodes))]
    for wrapper, level in zip(wrappers, tree_levels(work), strict=True):
        _plan_prefill(wrapper, level, work)

    def step(pages: torch.Tensor) -> torch.Tensor:
        if len(wrappers) == 1:
            return wrappers[0].run(q, pages)
        out, lse = wrappers[-1].run(q, pages, return_lse=True)
        for wrapper in wrappers[:-1]:
            library.merge_state_in_place(out, lse, *wrapper.run(q, pages, return_lse=True))
        return out

    out = step(inputs.pages[0])
    return Contender([partial(step, copy) for copy in inputs.pages], out)


def two_streams(inputs: Inputs) -> Contender:
    """Return prefill over the shared part beside decode over the private one, then a merge."""
    library: Any = flashinfer()
    work, q = inputs.work, inputs.q
    shared, private = _prefill_wrapper(0), decode_wrapper(work.group > 1, "second stream")
    levels = tree_levels(work)
    _plan_prefill(shared, levels[0], work)
    plan_decode(private, levels[1][1], work)
    other = torch.cuda.Stream()

    def step(pages: torch.Tensor) -> torch.Tensor:
        here = torch.cuda.current_stream()
        other.wait_stream(here)
        with torch.cuda.stream(other):
            part, part_lse = private.run(q, pages, return_lse=True)
        out, lse = shared.run(q, pages, return_lse=True)
        here.wait_stream(other)
        library.merge_state_in_place(out, lse, part, part_lse)
        return out

    out = step(inputs.pages[0])
    return Contender([partial(step, copy) for copy in inputs.pages], out)


def contenders(inputs: Inputs) -> dict[str, Contender]:
    """Return all ways that suit a step, by name; one that fails is left out, with a word."""
    work = inputs.work
    if flashinfer() is None:
        return {}
    makers = {
        "flashinfer decode": partial(decode, use_tensor_cores=False),
        "flashinfer decode, tensor cores": partial(decode, use_tensor_cores=True),
    }
    if work.is_shared:
        makers["flashinfer cascade"] = cascade
        makers["flashinfer cascade, fa2"] = cascade_fa2
    if work.is_shared and len(work.nodes) == 2:
        makers["flashinfer two streams"] = two_streams
    found = {}
    for name, make in makers.items():
        try:
            found[name] = make(inputs)
        except Exception as problem:
            sys.stdout.write(f"{name} is left out: {type(problem).__name__}: {problem}\n")
    return found
