"""The benchmark's figures as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from chunkcache.cli.serve_bench.results import BenchResult, ContenderResult, ExperimentResult

_COLOURS = {"sharing on": "#2a7f62", "sharing off": "#b8b8b8", "transformers": "#d9a441"}
_CURVES_PER_LINE = 4


def draw_plot(result: BenchResult, path: Path) -> None:
    """Write a PNG: latency, memory and rates of all workloads, and latency over rate of each."""
    searched = [
        experiment
        for experiment in result.experiments
        if any(contender.search for contender in experiment.contenders.values())
    ]
    per_line = max(1, min(_CURVES_PER_LINE, len(searched)))
    num_lines = -(-len(searched) // per_line)
    picture = Picture(figsize=(16, 4 + 3.4 * num_lines), layout="constrained")
    machine, options = result.machine, result.options
    picture.suptitle(
        f"chunkcache bench serve: {options['model']}, {options['dtype']}, "
        f"{machine['accelerator'] or machine['processor']}, {machine['date'][:10]}"
    )
    grid = picture.add_gridspec(1 + num_lines, 12)
    limit = options["latency_limit_ms"]
    bars: list[tuple[str, Callable[[ContenderResult], float | None]]] = [
        ("normalised latency, ms per token", lambda contender: contender.latency_ms),
        ("peak K/V, MiB", _peak_kv_mebibytes),
        ("requests/s, all at once", lambda contender: contender.throughput_rps),
        (f"requests/s within {limit:g} ms per token", _rate),
    ]
    for index, (title, value) in enumerate(bars):
        axes = picture.add_subplot(grid[0, 3 * index : 3 * index + 3])
        _draw_bars(axes, title, value, result.experiments)
    width = 12 // per_line
    for index, experiment in enumerate(searched):
        line, place = divmod(index, per_line)
        axes = picture.add_subplot(grid[1 + line, width * place : width * (place + 1)])
        _draw_curve(axes, experiment, limit)
    picture.savefig(path, dpi=120, format="png")


def _peak_kv_mebibytes(contender: ContenderResult) -> float | None:
    return None if contender.peak_kv_bytes is None else contender.peak_kv_bytes / 2**20


def _rate(contender: ContenderResult) -> float | None:
    return None if contender.search is None else contender.search.rps


def _draw_bars(
    axes: Axes,
    title: str,
    value: Callable[[ContenderResult], float | None],
    experiments: list[ExperimentResult],
) -> None:
    names = list(experiments[0].contenders)
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        values = [value(experiment.contenders[name]) for experiment in experiments]
        at = np.arange(len(experiments)) + (index - (len(names) - 1) / 2) * width
        bars = axes.bar(at, [v or 0 for v in values], width, color=_COLOURS[name], label=name)
        texts = ["" if v is None else f"{v:.3g}" for v in values]
        axes.bar_label(bars, texts, fontsize=7, padding=1)
    axes.set_title(title, fontsize=10)
    labels = [experiment.experiment.label.replace(" ", "\n", 1) for experiment in experiments]
    axes.set_xticks(range(len(experiments)), labels, fontsize=7)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _draw_curve(axes: Axes, result: ExperimentResult, limit: float) -> None:
    for name, contender in result.contenders.items():
        trials = contender.search.trials if contender.search else []
        points = [(t.rps, t.latency_ms) for t in trials if t.latency_ms is not None]
        if result.experiment.row is not None and contender.latency_ms is not None:
            points.append((result.experiment.row.rps, contender.latency_ms))
        points.sort()
        if points:
            rates, latencies = zip(*points, strict=True)
            axes.plot(rates, latencies, "o-", color=_COLOURS[name], label=name, markersize=4)
        # A run that was stopped says only that the limit is passed there.
        missed = [trial.rps for trial in trials if trial.latency_ms is None]
        axes.plot(missed, [limit] * len(missed), "^", color=_COLOURS[name], markersize=5)
    axes.axhline(limit, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_title(result.experiment.label.split(" at ")[0], fontsize=10)
    axes.set_xlabel("requests/s (triangle: over the limit, stopped)", fontsize=8)
    axes.set_ylabel("ms per token", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
