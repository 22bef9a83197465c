"""The ways to compute a step that are timed: this project's kernels, a plain read, torch's SDPA."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from gpu_timing import Contender, num_copies
from gpu_workloads import HEAD_DIM, Workload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from chunkcache.kernels.costs import costs_of
from chunkcache.kernels.driver import Launch, load
from chunkcache.kernels.params import Operands, Scores, Strides
from chunkcache.kernels.table import find
from chunkcache.kernels.tpp import Pages, Path, TppAttention, TppTables
from chunkcache.kernels.work import PlanTables, cut_tables

#: Sequences of a step that outputs are compared at.
NUM_CHECKED = 3


@dataclass(frozen=True)
class Inputs:
    """Random values of a step.

    Attributes:
        work: the step.
        pages: copies of the paged K/V `[copies, pages, 2, num_kv_heads, page_size, head_dim]`.
        q: queries `[batch, num_qo_heads, head_dim]`.
        rows: sequences that outputs are compared at.
        reference: attention of those in float64, `[rows, num_qo_heads, head_dim]`.
    """

    work: Workload
    pages: torch.Tensor
    q: torch.Tensor
    rows: torch.Tensor
    reference: torch.Tensor

    @classmethod
    def random(cls, work: Workload) -> Inputs:
        """Standard normal K, V and queries."""
        shape = (work.num_kv_heads, work.page_size, HEAD_DIM)
        half = {"dtype": torch.float16, "device": "cuda"}
        copies = num_copies(work.kv_bytes)
        pages = torch.empty(copies, len(work.page_ids), 2, *shape, **half).normal_()
        if work.item_size == 1:
            pages = pages.to(torch.float8_e4m3fn)
        q = torch.randn(work.batch, work.num_qo_heads, HEAD_DIM, **half)
        rows = torch.linspace(0, work.batch - 1, NUM_CHECKED).long().unique().cuda()
        table = torch.from_numpy(work.block_table()).cuda()[rows]
        # Elements of 8 bits cannot be gathered as what they are.
        found = pages[0].view(torch.uint8)[table].view(pages.dtype).double()
        k, v = (x.transpose(2, 3).flatten(1, 2)[:, : work.context] for x in found.unbind(2))
        grouped = q[rows].double().unflatten(1, (work.num_kv_heads, work.group))
        scores = torch.einsum("bhgd,bnhd->bhgn", grouped, k) / HEAD_DIM**0.5
        reference = torch.einsum("bhgn,bnhd->bhgd", scores.softmax(-1), v).flatten(1, 2)
        return cls(work, pages, q, rows, reference)

    def error(self, out: torch.Tensor) -> float:
        """Return the largest `max|out - reference| / max|reference|` of a row and head."""
        difference = (out[self.rows].double() - self.reference).abs().amax(-1)
        return float((difference / self.reference.abs().amax(-1)).max())


def two_phase(
    inputs: Inputs, tables: PlanTables, path: Path = "sm_90", *, overlap: bool = False
) -> Contender:
    """Return this project's attention over the tables of a step.

    Args:
        inputs: the values.
        tables: of the same sequences over the same pages.
        path: the kernels.
        overlap: let launches start while the ones before end.
    """
    work, device = inputs.work, torch.cuda.current_device()
    heads = (work.num_qo_heads, work.num_kv_heads)
    kv_element = "F16" if work.item_size == 2 else "E4M3"
    attention = TppAttention(device, "F16", kv_element, *heads, HEAD_DIM, path)
    stream = torch.cuda.current_stream().cuda_stream
    costs = costs_of(device).for_item_size(work.item_size)
    schedule = cut_tables(tables, attention.heads, costs)
    on_device = TppTables(device, tables, schedule, HEAD_DIM, stream)
    q, out = inputs.q, torch.full_like(inputs.q, torch.nan)
    operands = Operands(
        q=q.data_ptr(),
        q_row=q.stride(0),
        q_head=q.stride(1),
        out=out.data_ptr(),
        out_row=out.stride(0),
        out_head=out.stride(1),
        lse=0,
    )
    strides = Strides(*(work.item_size * inputs.pages.stride(dim) for dim in (1, 3, 4)))
    launches = [
        attention.launch(
            on_device,
            Pages(
                k=copy[0, 0].data_ptr(),
                v=copy[0, 1].data_ptr(),
                k_strides=strides,
                v_strides=strides,
                num_pages=len(copy),
                page_size=work.page_size,
            ),
            operands,
            Scores(HEAD_DIM**-0.5, 0.0, -1),
            overlap=overlap,
        )
        for copy in inputs.pages
    ]
    # A launch names memory by its address alone: the call holds what has to stay.
    return Contender([partial(_run, launch, on_device, inputs) for launch in launches], out)


def _run(launch: Launch, *_kept: object) -> None:
    launch.run(torch.cuda.current_stream().cuda_stream)


def plain_read(inputs: Inputs) -> Contender:
    """Return a read of as many bytes as the step has to read: the floor."""
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    reader = load(find("read_pages"), torch.cuda.current_device(), 0)
    vectors = inputs.work.kv_bytes // 16
    launches = [
        Launch(
            reader,
            -(-vectors // 4096),
            256,
            0,
            np.array([copy.data_ptr(), vectors, sink.data_ptr()], np.uint64).tobytes(),
        )
        for copy in inputs.pages
    ]
    return Contender([partial(_run, launch, inputs, sink) for launch in launches])


def sdpa(inputs: Inputs) -> Contender:
    """Return torch's attention by cuDNN over K and V that are contiguous for each sequence.

    The queries of a group are given as rows of their K/V head, which is its fastest form.
    """
    work = inputs.work
    shape = (work.num_kv_heads, work.context, HEAD_DIM)
    table = torch.from_numpy(work.block_table()).cuda()
    dense = torch.empty(
        len(inputs.pages), 2, work.batch, *shape, dtype=torch.float16, device="cuda"
    )
    for copy, pages in zip(dense, inputs.pages, strict=True):
        for side in (0, 1):
            rows = pages[table, side].transpose(1, 2).flatten(2, 3)
            copy[side] = rows[:, :, : work.context]
    q = inputs.q.unflatten(1, (work.num_kv_heads, work.group))
    out = torch.empty_like(inputs.q)

    def step(copy: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, copy[0], copy[1])

    out.copy_(step(dense[0]).flatten(1, 2))
    return Contender([partial(step, copy) for copy in dense], out)
