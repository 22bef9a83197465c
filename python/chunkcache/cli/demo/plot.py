"""The demo's figures as a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from chunkcache.cli.demo.report import FIGURES, Figure, ratio_text
from chunkcache.cli.demo.serve import DemoResult

_COLOURS = {"sharing on": "#2a7f62", "sharing off": "#b8b8b8"}
_BARS = ("prompt_tokens_computed", "time_to_first_token_mean_s", "decode_ms_per_token", "kv_bytes")


def draw_plot(result: DemoResult, path: Path) -> None:
    """Write a PNG with the main figures of both runs and their answers over time."""
    picture = Picture(figsize=(11, 7), layout="constrained")
    picture.suptitle(
        f"{len(result.inputs.questions)} users behind one system prompt of "
        f"{result.num_shared_tokens:,} tokens, {result.model}"
    )
    grid = picture.add_gridspec(2, len(_BARS))
    by_key = {figure.key: figure for figure in FIGURES}
    for column, key in enumerate(_BARS):
        _draw_bars(picture.add_subplot(grid[0, column]), by_key[key], result)
    _draw_timeline(picture.add_subplot(grid[1, :]), result)
    picture.savefig(path, dpi=120, format="png")


def _draw_bars(axes: Axes, figure: Figure, result: DemoResult) -> None:
    values = [figure.value(result.shared), figure.value(result.separate)]
    bars = axes.bar(list(_COLOURS), values, color=list(_COLOURS.values()), width=0.6)
    axes.bar_label(bars, [figure.text(value) for value in values], padding=2)
    axes.set_title(f"{figure.label}\n{ratio_text(figure, result, ' times less')}", fontsize=10)
    axes.set_yticks([])
    axes.margins(y=0.15)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_timeline(axes: Axes, result: DemoResult) -> None:
    for (label, colour), half in zip(
        _COLOURS.items(), (result.shared, result.separate), strict=True
    ):
        seconds, tokens = zip(*half.timeline, strict=True)
        axes.step([0, *seconds], [0, *tokens], where="post", color=colour, label=label, linewidth=2)
    axes.set_xlabel("seconds since the requests came in")
    axes.set_ylabel("tokens generated")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
