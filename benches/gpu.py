"""Check and time the CUDA kernels: `python benches/gpu.py [--out FILE] [--plots FOLDER]`.

Each row is one decode step (one query token a sequence), its contenders recorded as CUDA graphs and
replayed in turns, cold: the steps of a graph rotate over K/V buffers of 270 MB and more together,
so that the L2 serves nothing. Outputs are compared with float64 first. Beside this project's
kernels (`two-phase`; `overlapped`: launches that start while the ones before end; `sm_80`: those
for other devices; `same pages`: the same step without sharing what is read; `nothing shared`: each
sequence with K/V of its own) stand a plain read of the same bytes, torch's SDPA by cuDNN where
nothing is shared, and FlashInfer's kernels where it is installed. Microseconds, medians.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_peers
import torch
from gpu_contenders import Inputs, plain_read, sdpa, two_phase
from gpu_plan import plan_times
from gpu_plots import plot_curves, plot_rows
from gpu_table import OURS, tables
from gpu_timing import Contender, Timing, interleave
from gpu_workloads import FP8_ROWS, HEAD_PAIRS, ROWS, TREES, Workload, prompt, tree

#: The largest error of a float16 output that counts as right: of ours, and of those who merge
#: partial states in float16; and with K and V in fp8, against what those are.
MAX_ERROR, MAX_PEER_ERROR, MAX_FP8_ERROR = 1e-3, 3e-3, 1e-2
#: The paper's lengths of the common prompt, and how far sequences have diverged, against them.
PROMPTS = (1024, 2048, 4096)
DIVERGED = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
BATCHES = (16, 32, 48, 64, 80, 96)
SECTIONS = ("rows", "fp8", "trees", "divergence", "batch", "plan")


@dataclass(frozen=True)
class Row:
    """One timed step: microseconds and errors by contender."""

    work: Workload
    timings: dict[str, Timing]
    errors: dict[str, float]

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """The fastest contender that is not ours, and its time."""
        peers = {n: t.us for n, t in self.timings.items() if n not in OURS and n != "read"}
        return min(peers.items(), key=lambda peer: peer[1]) if peers else None

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.work.name,
            "batch": self.work.batch,
            "page_size": self.work.page_size,
            "kv_bytes": self.work.kv_bytes,
            "goal": self.work.goal,
            "us": {name: [t.us, t.low, t.high] for name, t in self.timings.items()},
            "error": self.errors,
        }


def ours(inputs: Inputs) -> dict[str, Contender]:
    """Return this project's ways to compute a step, on each path and in both of the two ways."""
    tables = inputs.work.tables()
    ways = {
        "two-phase": two_phase(inputs, tables),
        "overlapped": two_phase(inputs, tables, overlap=True),
        "sm_80": two_phase(inputs, tables, "sm_80"),
    }
    if inputs.work.is_shared:
        ways["same pages"] = two_phase(inputs, inputs.work.unshared_tables())
    return ways


def all_ways(inputs: Inputs) -> dict[str, Contender]:
    """Return the contenders of a row: ours, the floor and the peers."""
    found = {**ours(inputs), "read": plain_read(inputs), **gpu_peers.contenders(inputs)}
    if not inputs.work.is_shared:
        found["sdpa, cudnn"] = sdpa(inputs)
    return found


def fp8_ways(inputs: Inputs) -> dict[str, Contender]:
    """Return the contenders of a row with K and V in fp8: ours and the floor."""
    return {
        "two-phase": two_phase(inputs, inputs.work.tables(), "sm_89"),
        "read": plain_read(inputs),
    }


def with_and_without(inputs: Inputs) -> dict[str, Contender]:
    """Return the contenders of trees and curves: ours with sharing and without, the best peers."""
    work = inputs.work
    found = {"two-phase": two_phase(inputs, work.tables())}
    if work.is_shared:
        found["same pages"] = two_phase(inputs, work.unshared_tables())
    found["read"] = plain_read(inputs)
    if gpu_peers.flashinfer() is not None:
        tensor_cores = work.group > 1
        found["flashinfer decode"] = gpu_peers.decode(inputs, use_tensor_cores=tensor_cores)
        if work.is_shared:
            found["flashinfer cascade, fa2"] = gpu_peers.cascade_fa2(inputs)
    return found


def measure(
    work: Workload, ways: Callable[[Inputs], dict[str, Contender]], rounds: int, *, separate: bool
) -> Row:
    """Check and time a step.

    Args:
        work: the step.
        ways: the contenders.
        rounds: replays of each.
        separate: time the same sequences with K/V of their own, too.
    """
    inputs = Inputs.random(work)
    contenders = ways(inputs)
    errors = {}
    for name, contender in contenders.items():
        if contender.out is not None:
            contender.steps[0]()
            torch.cuda.synchronize()
            errors[name] = inputs.error(contender.out)
    if separate and work.is_shared:
        alone = work.separate()
        apart = Inputs.random(alone)
        contender = two_phase(apart, alone.tables())
        contender.steps[0]()
        torch.cuda.synchronize()
        errors["nothing shared"] = apart.error(contender.out)
        contenders["nothing shared"] = contender
    wrong = {name: error for name, error in errors.items() if not error <= _allowed(name, work)}
    if wrong:
        raise AssertionError(f"{work.name}: wrong outputs: {wrong}")
    return Row(work, interleave(contenders, rounds), errors)


def _allowed(name: str, work: Workload) -> float:
    if work.item_size == 1:
        return MAX_FP8_ERROR
    return MAX_ERROR if name in OURS else MAX_PEER_ERROR


def show(row: Row) -> None:
    """Print a row."""
    goal = f"goal {row.work.goal:g}" if row.work.goal else ""
    worst = max(row.errors.values())
    times = ", ".join(f"{name} {timing.us:.1f}" for name, timing in row.timings.items())
    sys.stdout.write(f"{row.work.name:42} {goal:10} {times} (error {worst:.0e})\n")
    sys.stdout.flush()


def run(
    works: Iterable[Workload],
    ways: Callable[[Inputs], dict[str, Contender]],
    arguments: argparse.Namespace,
    *,
    separate: bool,
) -> list[Row]:
    """Measure and print steps, one after the other."""
    rows = []
    for work in works:
        if arguments.only in work.name:
            rows.append(measure(work, ways, arguments.rounds, separate=separate))
            show(rows[-1])
            torch.cuda.empty_cache()
    return rows


def slower_than_one_way(rows: Iterable[Row]) -> list[str]:
    """Return the steps that one of the two ways computes faster than what the cost model chose."""
    found = []
    for row in rows:
        chosen, other = row.timings["two-phase"], row.timings.get("same pages")
        if other is not None and other.high < chosen.low:
            found.append(f"{row.work.name}: {chosen.us:.1f}, without sharing {other.us:.1f}")
    return found


def driver_version() -> str:
    """Return the version of the display driver, if the system says."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as lines:
            found = re.search(r"\b\d+\.\d+(\.\d+)?\b", lines.readline())
    except OSError:
        return "of unknown version"
    return found[0] if found else "of unknown version"


def machine() -> dict[str, Any]:
    """Return what the figures belong to."""
    peers = gpu_peers.flashinfer()
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "flashinfer": "not installed" if peers is None else peers.__version__,
        "command": "python " + " ".join(sys.argv),
        "unit": "microseconds: median, lower and upper quartile",
    }


def main() -> None:
    """Run the sections that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a JSON file for the results; tables go beside it")
    parser.add_argument("--plots", type=Path, help="a folder for the plots")
    parser.add_argument("--only", default="", help="steps whose name has this in it")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    record = machine()
    sys.stdout.write("".join(f"{name}: {value}\n" for name, value in record.items()))
    works = {
        "rows": ROWS,
        "fp8": FP8_ROWS,
        "trees": [tree(*shape, heads) for shape in TREES for heads in HEAD_PAIRS],
        "divergence": [
            prompt(32, (32, 32), shared + int(shared * part), shared)
            for shared in PROMPTS
            for part in DIVERGED
        ],
        "batch": [prompt(batch, (32, 32), 2048 + 64, 2048) for batch in BATCHES],
    }
    timed: dict[str, list[Row]] = {}
    for section in arguments.sections:
        sys.stdout.write(f"\n{section}\n")
        if section == "plan":
            record["plan"] = plan_times()
            for name, us in record["plan"].items():
                sys.stdout.write(f"{name:42} {us:8.1f}\n")
        else:
            ways = {"rows": all_ways, "fp8": fp8_ways}.get(section, with_and_without)
            separate = section not in ("rows", "fp8")
            timed[section] = run(works[section], ways, arguments, separate=separate)
            record[section] = [row.record() for row in timed[section]]
        slower = slower_than_one_way(row for rows in timed.values() for row in rows)
        record["slower than without sharing"] = slower
        # What comes later may fail.
        if arguments.out:
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")
            arguments.out.with_suffix(".md").write_text(tables(record))
    sys.stdout.write("\nslower than without sharing: " + ("; ".join(slower) or "none") + "\n")
    if arguments.plots:
        plot_rows(arguments.plots / "h200_rows.png", timed.get("rows", []))
        plot_curves(arguments.plots, timed.get("divergence", []), timed.get("batch", []))


if __name__ == "__main__":
    main()
