"""The plots of the benchmark of the CUDA kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from gpu import Row

mpl.use("Agg")

SERIES = (
    ("two-phase", "chunkcache, shared", "o"),
    ("same pages", "chunkcache, shared pages read by each", "s"),
    ("nothing shared", "chunkcache, not shared", "D"),
    ("flashinfer cascade, fa2", "FlashInfer cascade (fa2)", "^"),
    ("flashinfer decode", "FlashInfer decode over shared pages", "v"),
)


def _draw(axes: plt.Axes, rows: Sequence[Row], points: Sequence[int]) -> None:
    for name, label, marker in SERIES:
        shown = [(x, row) for x, row in zip(points, rows, strict=True) if name in row.timings]
        rates = [row.work.batch / row.timings[name].us for _, row in shown]
        if shown:
            axes.plot([x for x, _ in shown], rates, marker=marker, markersize=4, label=label)
    axes.set(yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(which="both", labelsize=7)
    axes.grid(alpha=0.3, which="both")


def plot_curves(folder: Path, divergence: Sequence[Row], batch: Sequence[Row]) -> None:
    """Draw millions of decoded tokens per second, as far as there are rows, into a folder."""
    if divergence:
        prompts = sorted({row.work.tokens[0] for row in divergence})
        figure, panels = plt.subplots(
            1, len(prompts), figsize=(4 * len(prompts), 4), layout="constrained", squeeze=False
        )
        for axes, shared in zip(panels[0], prompts, strict=True):
            rows = [row for row in divergence if row.work.tokens[0] == shared]
            _draw(axes, rows, [row.work.context - shared for row in rows])
            axes.set(title=f"{shared} tokens in common", xlabel="tokens of each sequence's own")
        panels[0][0].set(ylabel="decoded tokens / us (attention alone)")
        figure.legend(
            *panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3
        )
        figure.savefig(folder / "h200_divergence.png", dpi=130)
        plt.close(figure)
    if batch:
        figure, axes = plt.subplots(figsize=(6, 4.5), layout="constrained")
        _draw(axes, batch, [row.work.batch for row in batch])
        axes.set(
            title="2048 tokens in common, 64 of each sequence's own",
            xlabel="sequences",
            ylabel="decoded tokens / us (attention alone)",
        )
        figure.legend(loc="outside lower center", ncols=2, fontsize=7)
        figure.savefig(folder / "h200_batch.png", dpi=130)
        plt.close(figure)


def plot_rows(path: Path, rows: Sequence[Row]) -> None:
    """Draw every row's time over a plain read of its bytes, beside the best peer's."""
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(8, 0.26 * len(rows) + 1.2), layout="constrained")
    ticks = range(len(rows))
    floors = [row.timings["read"].us for row in rows]
    peers = [None if row.best_peer is None else row.best_peer[1] for row in rows]
    named = (
        ("best peer of the run", peers),
        ("chunkcache", [row.timings["overlapped"].us for row in rows]),
        ("goal", [row.work.goal for row in rows]),
    )
    for (label, times), marker in zip(named, "^o|", strict=True):
        ratios = [float("nan") if t is None else t / f for t, f in zip(times, floors, strict=True)]
        axes.plot(ratios, ticks, marker, markersize=6, label=label)
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="time / plain read of the same bytes")
    axes.set_yticks(ticks, [row.work.name for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, axis="x", which="both")
    figure.legend(loc="outside lower center", ncols=len(named))
    figure.savefig(path, dpi=130)
    plt.close(figure)
