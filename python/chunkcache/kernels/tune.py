"""Measures the constants that work items are cut by, on the device at hand.

Each constant in turn is moved up and down by factors of two, then of their root, as long as a few
decode steps of different kinds get faster in the geometric mean: nothing shared, half and all of a
prompt shared, with as many K/V heads as query heads and with fewer.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from chunkcache import attention
from chunkcache.kernels.driver import Launch, limits
from chunkcache.kernels.params import Operands, Scores, Strides
from chunkcache.kernels.tpp import Pages, TppAttention, TppTables, best_path
from chunkcache.kernels.work import DeviceCosts, cut_plan, plan_tables

if TYPE_CHECKING:
    import torch

HEAD_DIM = 128
PAGE_SIZE = 64
#: What the constants are called, in the order in which they are measured.
CONSTANTS = ("item", "row_tile", "partial_row")
_FACTORS = (2.0, math.sqrt(2.0))
#: A change counts if it gains more than this: below is noise.
_GAIN = 0.003
_REPEATS = 9
_LAUNCHES = 8


@dataclass(frozen=True)
class Workload:
    """A decode step of one token for each sequence."""

    batch: int
    num_qo_heads: int
    num_kv_heads: int
    prompt: int
    shared: int


WORKLOADS = (
    Workload(32, 32, 32, 2048, 0),
    Workload(32, 32, 32, 2048, 1024),
    Workload(32, 32, 32, 1024, 1024),
    Workload(32, 32, 8, 4096, 2048),
    Workload(32, 32, 8, 4096, 4096),
    Workload(64, 32, 8, 8448, 8192),
    Workload(16, 32, 32, 2112, 2048),
)


def search(
    start: DeviceCosts, seconds: Callable[[DeviceCosts], float]
) -> Iterator[tuple[DeviceCosts, float]]:
    """Yield better and better constants and the time that they give, the best last.

    Args:
        start: the constants to begin with.
        seconds: the time of a choice.
    """
    best, least = start, seconds(start)
    yield best, least
    for factor in _FACTORS:
        for name in CONSTANTS:
            for step in (factor, 1 / factor):
                while True:
                    tried = replace(best, **{name: getattr(best, name) * step})
                    found = seconds(tried)
                    if found > least * (1 - _GAIN):
                        break
                    best, least = tried, found
                    yield best, least


class Bench:
    """The workloads on one device, ready to be timed under different constants."""

    def __init__(self, device: int) -> None:
        """Allocate K, V and queries."""
        import torch

        self._torch: Any = torch
        self._device = device
        place = torch.device("cuda", device)
        pages = max(_num_pages(work) for work in WORKLOADS)
        heads = max(work.num_kv_heads for work in WORKLOADS)
        shape = (pages * heads * 2, PAGE_SIZE, HEAD_DIM)
        self._kv = torch.randn(shape, dtype=torch.float16, device=place)
        self._q = torch.randn(64, 32, HEAD_DIM, dtype=torch.float16, device=place)
        self._out = torch.empty_like(self._q)
        self._plans = [
            attention.plan_from_block_tables(
                _block_table(work), [work.prompt] * work.batch, PAGE_SIZE
            )
            for work in WORKLOADS
        ]

    def seconds(self, costs: DeviceCosts) -> float:
        """Return the geometric mean of the workloads' times."""
        times = [
            self._time(work, plan, costs) for work, plan in zip(WORKLOADS, self._plans, strict=True)
        ]
        return statistics.geometric_mean(times)

    def _time(self, work: Workload, plan: Any, costs: DeviceCosts) -> float:
        torch = self._torch
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            launch = self._launch(work, plan, costs, stream.cuda_stream)
            with torch.cuda.stream(stream):
                launch.run(stream.cuda_stream)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    for _ in range(_LAUNCHES):
                        launch.run(torch.cuda.current_stream().cuda_stream)
                return _median_of_replays(torch, graph, stream)

    def _launch(self, work: Workload, plan: Any, costs: DeviceCosts, stream: int) -> Launch:
        heads = work.num_kv_heads
        tpp = TppAttention(
            self._device,
            "F16",
            "F16",
            work.num_qo_heads,
            heads,
            HEAD_DIM,
            best_path(self._device, "F16"),
        )
        tables = TppTables(
            self._device,
            plan_tables(plan),
            cut_plan(plan, tpp.heads, costs),
            HEAD_DIM,
            stream,
        )
        head = PAGE_SIZE * HEAD_DIM * 2
        strides = Strides(page=2 * heads * head, head=head, token=HEAD_DIM * 2)
        pages = Pages(
            k=self._kv.data_ptr(),
            v=self._kv.data_ptr() + heads * head,
            k_strides=strides,
            v_strides=strides,
            num_pages=_num_pages(work),
            page_size=PAGE_SIZE,
        )
        q, out = self._q, self._out
        operands = Operands(
            q=q.data_ptr(),
            q_row=q.stride(0),
            q_head=q.stride(1),
            out=out.data_ptr(),
            out_row=out.stride(0),
            out_head=out.stride(1),
            lse=0,
        )
        launch = tpp.launch(tables, pages, operands, Scores(HEAD_DIM**-0.5, 0.0, -1))
        # The launch names memory by its address alone.
        self._tables = tables
        return launch


def tune(device: int, report: Callable[[DeviceCosts, float], None]) -> DeviceCosts:
    """Measure a device's constants.

    Args:
        device: CUDA ordinal.
        report: called with each improvement: the constants, and the mean time over the first one.

    Raises:
        KernelError: no device, or kernels that cannot be built.
    """
    start = DeviceCosts(num_blocks=limits(device).num_multiprocessors)
    bench = Bench(device)
    first, best = 0.0, start
    for best, found in search(start, bench.seconds):
        first = first or found
        report(best, found / first)
    return best


def _median_of_replays(torch: Any, graph: "torch.cuda.CUDAGraph", stream: Any) -> float:
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        graph.replay()
        end.record(stream)
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / _LAUNCHES)
    median: float = statistics.median(times)
    return median


def _num_pages(work: Workload) -> int:
    private = (work.prompt - work.shared) // PAGE_SIZE
    return work.shared // PAGE_SIZE + work.batch * private


def _block_table(work: Workload) -> list[list[int]]:
    shared = work.shared // PAGE_SIZE
    private = (work.prompt - work.shared) // PAGE_SIZE
    return [
        [*range(shared), *range(shared + row * private, shared + (row + 1) * private)]
        for row in range(work.batch)
    ]
