"""Whose microseconds a decode step is made of, from the profiler's kernel times.

Kernels start while those before them end, so that their own times overlap. Here a kernel gets the
time from the end of all before it to its own end: what it adds to the step.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

#: The first kernel of every recorded step.
FIRST_KERNEL = "apply_tables"

#: The parts of a step, by what their kernels' names contain; the first that fits.
_PARTS = (
    ("tables", ("apply_tables",)),
    ("attention", ("tpp_",)),
    ("products", ("decode_product",)),
    ("head and library products", ("nvjet", "gemm", "cutlass", "gemv", "splitK", "cublas")),
    ("q, k, v: rotate, write", ("decode_rotate", "write_kv")),
    ("add and normalize", ("decode_normalize", "rms_norm", "triton_red", "RowwiseMoments")),
    ("gate", ("decode_gate", "silu", "triton_poi")),
    ("best token", ("reduce_kernel", "decode_best", "isfinite", "where")),
)


class Kernel(NamedTuple):
    """A kernel as it ran, in microseconds."""

    name: str
    begin: float
    end: float


class Profile(NamedTuple):
    """Means over the steps that were watched, in microseconds.

    Attributes:
        step: from the beginning of a step to that of the next.
        gap: from the end of a step's last kernel to the beginning of the next step; the median.
        kernels: number of kernels of a step.
        parts: what each part adds, the gap included; they sum to `step`.
    """

    step: float
    gap: float
    kernels: float
    parts: dict[str, float]


def watch(run_step: Callable[[], Any], num_steps: int) -> Profile:
    """Profile steps of an engine that is decoding.

    Args:
        run_step: hands one step to the device.
        num_steps: how many.
    """
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            run_step()
        torch.cuda.synchronize()
    kernels = [
        Kernel(event.name, float(event.time_range.start), float(event.time_range.end))
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in event.name[:3]
    ]
    return attributed(kernels)


def attributed(kernels: Iterable[Kernel]) -> Profile:
    """Attribute the time of the steps between the first and the last `FIRST_KERNEL`."""
    ordered = sorted(kernels, key=lambda kernel: kernel.begin)
    starts = [i for i, kernel in enumerate(ordered) if FIRST_KERNEL in kernel.name]
    parts: Counter[str] = Counter()
    gaps: list[float] = []
    num_kernels = 0
    for first, following in itertools.pairwise(starts):
        now = ordered[first].begin
        for kernel in sorted(ordered[first:following], key=lambda kernel: kernel.end):
            num_kernels += 1
            parts[_part_of(kernel.name)] += max(kernel.end - now, 0.0)
            now = max(now, kernel.end)
        gaps.append(max(ordered[following].begin - now, 0.0))
        parts["between steps"] += gaps[-1]
    num_steps = max(len(gaps), 1)
    span = ordered[starts[-1]].begin - ordered[starts[0]].begin if gaps else 0.0
    return Profile(
        span / num_steps,
        statistics.median(gaps) if gaps else 0.0,
        num_kernels / num_steps,
        {name: total / num_steps for name, total in parts.most_common()},
    )


def _part_of(name: str) -> str:
    return next((part for part, keys in _PARTS if any(key in name for key in keys)), "other")
