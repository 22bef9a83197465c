"""The plots of the attention benchmark."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from rows import Curve, Row

mpl.use("Agg")


def plot_curve(path: Path, curve: Curve, rows: list[Row]) -> None:
    """Tokens per second of each contender along one axis."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    series = {
        "chunkcache, shared": lambda row: row.timings["shared"].median,
        "chunkcache, not shared": lambda row: row.timings["unshared"].median,
        "torch two-phase": lambda row: row.timings["two-phase"].median,
        "torch SDPA, best form": lambda row: row.best_sdpa,
    }
    for (name, seconds), marker in zip(series.items(), "osD^", strict=True):
        rates = [row.case.batch / seconds(row) for row in rows]
        axes.plot(curve.points, rates, marker=marker, label=name)
    axes.set(
        title=curve.title,
        xlabel=curve.xlabel,
        ylabel="decoded tokens / s (attention alone)",
        yscale="log",
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_table(path: Path, rows: list[Row]) -> None:
    """Every case's time over its floor, beside the peers'."""
    figure, axes = plt.subplots(figsize=(8, 0.24 * len(rows) + 1.2), layout="constrained")
    for name, pick in (
        ("torch SDPA, best form", lambda row: row.best_sdpa),
        ("torch two-phase", lambda row: row.timings["two-phase"].median),
        ("chunkcache", lambda row: row.timings["shared"].median),
    ):
        axes.plot(
            [pick(row) / row.floor for row in rows], range(len(rows)), "o", markersize=4, label=name
        )
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.axvline(1.6, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="time / floor (1 is the machine's limit; dotted: 1.6)")
    axes.set_yticks(range(len(rows)), [row.case.label() for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x", which="both")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)
