"""The attention table on the CPU: a decode step with sharing, without, and as torch users run it.

    python benches/attention.py                # the whole table, the curves, JSON and plots
    python benches/attention.py --quick        # a small part of it
    python benches/attention.py --filter bf16  # cases whose label contains the text

Every contender's output is compared with the others' before anything is timed; all take turns in
one process. The floors are measured in the same turns: reading as many bytes as the step's distinct
K and V, and a square matrix product's rate for its operations.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from caches import decode_step
from peers import Case, Inputs, product_floor, read_floor, sdpa_forms, two_phase
from plots import plot_curve, plot_table
from rich.console import Console
from rich.table import Table
from rows import Row
from timing import interleave, machine

import chunkcache

RESULTS = Path(__file__).parent / "results"
SHAPES = ((32, 32, 32, 128), (32, 32, 8, 128), (16, 9, 3, 64))
PROMPTS = (1024, 2048, 4096)
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 3e-2}


def cases(dtypes: Iterable[torch.dtype]) -> list[Case]:
    """The table's cases: none, a half, three quarters and all of the prompt shared."""
    return [
        Case(*shape, prompt, prompt * quarters // 4, dtype)
        for dtype in dtypes
        for shape in SHAPES
        for prompt in PROMPTS
        for quarters in (0, 2, 3, 4)
    ]


def contenders(case: Case, num_threads: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The ways to compute the case, checked against each other."""
    inputs = Inputs.random(case)
    ways = {
        "shared": decode_step(case, inputs, sharing=True, num_threads=num_threads),
        "unshared": decode_step(case, inputs, sharing=False, num_threads=num_threads),
        "two-phase": two_phase(case, inputs),
        **sdpa_forms(case, inputs),
    }
    reference = ways["sdpa"]().float()
    scale = reference.abs().amax(-1, keepdim=True)
    for name, way in ways.items():
        error = ((way().float() - reference).abs() / scale).max().item()
        if not error <= TOLERANCE[case.dtype]:
            raise SystemExit(f"{case.label()}: {name} differs from sdpa by {error:.1e}")
    return ways


def measure(case: Case, num_threads: int, budget: float) -> Row:
    """Time one case and its floors."""
    gc.collect()
    # A 16-bit product can be slower than a 32-bit one: the floor takes whichever is faster.
    products = {f"product {dtype}": product_floor(dtype) for dtype in {case.dtype, torch.float32}}
    timings = interleave(
        {
            **contenders(case, num_threads),
            "read": read_floor(case.kv_bytes),
            **{name: product for name, (product, _) in products.items()},
        },
        budget=budget,
    )
    product_seconds = min(
        timings.pop(name).median * case.operations / operations
        for name, (_, operations) in products.items()
    )
    return Row(case, timings, product_seconds)


def show(console: Console, rows: list[Row]) -> None:
    """Print the table."""
    table = Table(title="decode attention, ms a step (lower is better)")
    columns = (
        "case|shared|unshared|best sdpa|two-phase|read|ops|over floor|vs sdpa|vs two-phase|vs own"
    )
    for column in columns.split("|"):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for row in rows:
        ours = row.timings["shared"]
        unshared, pair = row.timings["unshared"].median, row.timings["two-phase"].median
        table.add_row(
            row.case.label(),
            f"{1e3 * ours.median:.3f} ±{50 * ours.spread:.0f}%",
            *(
                f"{1e3 * x:.3f}"
                for x in (
                    unshared,
                    row.best_sdpa,
                    pair,
                    row.timings["read"].median,
                    row.product_seconds,
                )
            ),
            f"{ours.median / row.floor:.2f}",
            *(f"{x / ours.median:.2f}x" for x in (row.best_sdpa, pair, unshared)),
        )
    console.print(table)


def main() -> None:
    """Run the table and the two curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="prompts of 1024 tokens, short timing")
    parser.add_argument("--filter", default="", help="only cases whose label contains this")
    parser.add_argument("--threads", type=int, default=2, help="threads for every contender")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds of timing per case")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for JSON and plots")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    budget = 0.5 if arguments.quick else arguments.budget
    console = Console(width=170)
    arguments.output.mkdir(parents=True, exist_ok=True)

    chosen = [
        case
        for case in cases((torch.float32, torch.bfloat16))
        if arguments.filter in case.label() and (not arguments.quick or case.prompt == 1024)
    ]
    rows = []
    for case in chosen:
        rows.append(measure(case, arguments.threads, budget))
        console.print(rows[-1].case.label(), f"{rows[-1].record()['over_floor']:.2f} x floor")
    show(console, rows)

    curves = {}
    if not arguments.quick and not arguments.filter:
        generated = [64, 128, 256, 512, 1024]
        batches = [16, 32, 48, 64, 96]
        f32 = torch.float32
        curves = {
            "divergence": (
                "32 sequences behind 1,024 shared tokens",
                "tokens generated by each sequence",
                generated,
                [Case(32, 32, 8, 128, 1024 + n, 1024, f32) for n in generated],
            ),
            "batch": (
                "2,048 shared and 64 private tokens",
                "sequences",
                batches,
                [Case(b, 32, 8, 128, 2112, 2048, f32) for b in batches],
            ),
        }
    measured = {}
    for name, (title, xlabel, points, curve) in curves.items():
        curve_rows = [measure(case, arguments.threads, budget) for case in curve]
        show(console, curve_rows)
        plot_curve(arguments.output / f"cpu_{name}.png", title, xlabel, points, curve_rows)
        measured[name] = [row.record() for row in curve_rows]
    plot_table(arguments.output / "cpu_attention.png", rows)
    report = {
        "machine": machine(torch=torch.__version__, chunkcache=chunkcache.__version__),
        "threads": arguments.threads,
        "table": [row.record() for row in rows],
        **measured,
    }
    path = arguments.output / "cpu_attention.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"wrote {path} and the plots beside it")


if __name__ == "__main__":
    main()
