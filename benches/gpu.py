"""Check and time the CUDA kernels: `python benches/gpu.py [--out results.json]`.

Every row of the table is one decode step (one query token a sequence) in CUDA-graph replay, cold:
the launches of a graph rotate over K/V buffers of 270 MB and more together, so that the L2 serves
nothing. Beside each stands a plain read of the same bytes in the same run. Microseconds, medians.
"""

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from chunkcache.kernels.driver import Launch, load
from chunkcache.kernels.params import Operands, Scores, Strides
from chunkcache.kernels.table import find
from chunkcache.kernels.tpp import Pages, TppAttention, TppTables
from chunkcache.kernels.work import NONE, PlanTables, cut_tables

PAGE_SIZE = 64
HEAD_DIM = 128
COLD_BYTES = 270e6


@dataclass(frozen=True)
class Workload:
    """Sequences of `prompt` tokens whose first `shared` are common to all."""

    batch: int
    num_qo_heads: int
    num_kv_heads: int
    prompt: int
    shared: int
    goal: float

    @property
    def name(self) -> str:
        """The row's name."""
        heads = f"{self.num_qo_heads}/{self.num_kv_heads}"
        return f"b{self.batch} {heads} {self.prompt}/{self.shared}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a step has to read."""
        tokens = self.shared + self.batch * (self.prompt - self.shared)
        return tokens * self.num_kv_heads * HEAD_DIM * 2 * 2


WORKLOADS = [
    Workload(*row)
    for row in (
        (32, 32, 32, 1024, 0, 124),
        (32, 32, 32, 1024, 512, 70),
        (32, 32, 32, 1024, 768, 39),
        (32, 32, 32, 1024, 1024, 8.0),
        (32, 32, 32, 2048, 0, 241),
        (32, 32, 32, 2048, 1024, 135),
        (32, 32, 32, 2048, 1536, 74),
        (32, 32, 32, 2048, 2048, 11.5),
        (32, 32, 32, 4096, 0, 476),
        (32, 32, 32, 4096, 2048, 260),
        (32, 32, 32, 4096, 3072, 145),
        (32, 32, 32, 4096, 4096, 19.7),
        (32, 32, 8, 4096, 0, 127),
        (32, 32, 8, 4096, 2048, 70),
        (32, 32, 8, 4096, 4096, 9.5),
        (16, 32, 32, 2112, 0, 127),
        (16, 32, 32, 2112, 2048, 15.5),
        (96, 32, 32, 2112, 0, 740),
        (96, 32, 32, 2112, 2048, 36),
        (64, 32, 8, 8448, 0, 496),
        (64, 32, 8, 8448, 8192, 33),
    )
]


@dataclass
class Result:
    """One row: medians in microseconds, and the largest relative error."""

    name: str
    goal: float
    read: float
    us: float
    us_overlap: float
    spread: float
    error: float
    items: int
    slots: int


def plan_of(work: Workload) -> PlanTables:
    """The tables of one step; page numbers are a random permutation."""
    rng = np.random.default_rng(7)
    shared, private = work.shared // PAGE_SIZE, (work.prompt - work.shared) // PAGE_SIZE
    pages = rng.permutation(shared + work.batch * private).astype(np.uint32)
    segments = []
    leaf = np.zeros(work.batch, dtype=np.uint32)
    if shared:
        segments.append([NONE, 0, work.batch, 0, shared, 0])
    for i in range(work.batch if private else 0):
        leaf[i] = len(segments)
        parent = 0 if shared else NONE
        segments.append([parent, i, i + 1, work.shared, private, shared + i * private])
    sequences = np.zeros((work.batch, 5), dtype=np.uint32)
    sequences[:, 0] = leaf
    sequences[:, 1] = np.arange(work.batch)
    sequences[:, 2] = 1
    sequences[:, 3] = work.prompt
    return PlanTables(
        page_size=PAGE_SIZE,
        num_qo_rows=work.batch,
        order=np.arange(work.batch, dtype=np.uint32),
        sequences=sequences,
        segment_order=np.arange(len(segments), dtype=np.uint32),
        segments=np.array(segments, dtype=np.uint32),
        page_ids=pages,
    )


def time_graph(launches: list[Launch], repeats: int = 12) -> tuple[float, float]:
    """Median microseconds of a launch in graph replay, and the spread of replays in percent."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches:
            launch.run(stream.cuda_stream)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch.run(torch.cuda.current_stream().cuda_stream)
        times = []
        for i in range(repeats + 2):
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            if i >= 2:
                times.append(begin.elapsed_time(end) * 1e3 / len(launches))
    middle = statistics.median(times)
    return middle, 100 * (max(times) - min(times)) / middle


def check(work: Workload, plan: PlanTables, q, kv, out) -> float:
    """Largest relative error over some rows, against float64."""
    worst = 0.0
    group = work.num_qo_heads // work.num_kv_heads
    shared = work.shared // PAGE_SIZE
    ids = torch.from_numpy(plan.page_ids.astype(np.int64)).cuda()
    for i in {0, work.batch // 2, work.batch - 1}:
        private = (work.prompt - work.shared) // PAGE_SIZE
        path = torch.cat([ids[:shared], ids[shared + i * private : shared + (i + 1) * private]])
        k, v = (
            kv[path, side].transpose(1, 2).flatten(0, 1).double().transpose(0, 1) for side in (0, 1)
        )
        for head in range(work.num_kv_heads):
            queries = q[i, head * group : (head + 1) * group].double()
            weights = (queries @ k[head].T / HEAD_DIM**0.5).softmax(-1)
            ref = weights @ v[head]
            got = out[i, head * group : (head + 1) * group].double()
            worst = max(worst, float(((got - ref).abs().amax(1) / ref.abs().amax(1)).max()))
    return worst


def run(work: Workload, path: str) -> Result:
    """Check and time one row."""
    device = torch.cuda.current_device()
    attention = TppAttention(
        device, "F16", "F16", work.num_qo_heads, work.num_kv_heads, HEAD_DIM, path
    )
    plan = plan_of(work)
    schedule = cut_tables(plan, attention.heads)
    stream = torch.cuda.current_stream().cuda_stream
    tables = TppTables(device, plan, schedule, HEAD_DIM, stream)
    copies = max(2 if work.kv_bytes > COLD_BYTES else 4, int(np.ceil(COLD_BYTES / work.kv_bytes)))
    num_pages = len(plan.page_ids)
    buffers = torch.empty(
        copies,
        num_pages,
        2,
        work.num_kv_heads,
        PAGE_SIZE,
        HEAD_DIM,
        dtype=torch.float16,
        device="cuda",
    ).normal_()
    q = torch.randn(work.batch, work.num_qo_heads, HEAD_DIM, dtype=torch.float16, device="cuda")
    out = torch.full_like(q, float("nan"))
    operands = Operands(
        q=q.data_ptr(),
        q_row=q.stride(0),
        q_head=q.stride(1),
        out=out.data_ptr(),
        out_row=out.stride(0),
        out_head=out.stride(1),
        lse=0,
    )
    strides = Strides(
        page=buffers.stride(1) * 2, head=buffers.stride(3) * 2, token=buffers.stride(4) * 2
    )

    def launches(overlap: bool) -> list[Launch]:
        made = [
            attention.launch(
                tables,
                Pages(
                    k=buffers[i, 0, 0].data_ptr(),
                    v=buffers[i, 0, 1].data_ptr(),
                    k_strides=strides,
                    v_strides=strides,
                    num_pages=num_pages,
                    page_size=PAGE_SIZE,
                ),
                operands,
                Scores(HEAD_DIM**-0.5, 0.0, -1),
                overlap=overlap,
            )
            for i in range(copies)
        ]
        return made * max(1, 24 // copies)

    single = launches(False)
    single[0].run(stream)
    torch.cuda.synchronize()
    worst = check(work, plan, q, buffers[0], out)
    us, spread = time_graph(single)
    us_overlap, _ = time_graph(launches(True)) if path == "sm_90" else (0.0, 0.0)
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    reader = load(find("read_pages"), device, 0)
    vectors = work.kv_bytes // 16
    reads = [
        Launch(
            reader,
            -(-vectors // 4096),
            256,
            0,
            np.array([buffers[i].data_ptr(), vectors, sink.data_ptr()], np.uint64).tobytes(),
        )
        for i in range(copies)
    ]
    read, _ = time_graph(reads * max(1, 24 // copies))
    return Result(
        work.name,
        work.goal,
        read,
        us,
        us_overlap,
        spread,
        worst,
        len(schedule.items),
        schedule.num_slots,
    )


def main() -> None:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--path", default="sm_90", choices=("sm_90", "sm_80"))
    parser.add_argument("--only", type=str, default="")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    results = []
    write = sys.stdout.write
    write("workload                       goal    read    ours overlap spread   error items\n")
    for work in WORKLOADS:
        if arguments.only and arguments.only not in work.name:
            continue
        result = run(work, arguments.path)
        results.append(result)
        write(
            f"{result.name:28} {result.goal:7.1f} {result.read:7.1f} {result.us:7.1f}"
            f" {result.us_overlap:7.1f} {result.spread:5.1f}% {result.error:.1e} {result.items}\n"
        )
        sys.stdout.flush()
        torch.cuda.empty_cache()
    if arguments.out:
        record = {
            "device": torch.cuda.get_device_name(),
            "path": arguments.path,
            "rows": [asdict(result) for result in results],
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
