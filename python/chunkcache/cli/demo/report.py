"""The demo's figures, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chunkcache.cli.demo.serve import DemoResult, Half


@dataclass(frozen=True)
class Figure:
    """One measured quantity of a run.

    Attributes:
        key: its name for programs, with the unit.
        label: its name for people.
        value: reads it off a run.
        text: formats it.
    """

    key: str
    label: str
    value: Callable[[Half], float]
    text: Callable[[float], str]


def _mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


def _milliseconds(value: float) -> str:
    return f"{value:.1f} ms"


FIGURES = (
    Figure(
        "prompt_tokens_computed",
        "prompt tokens computed",
        lambda half: half.prompt_tokens_computed,
        lambda value: f"{value:,.0f}",
    ),
    Figure(
        "time_to_first_token_mean_s",
        "time to first token, mean",
        lambda half: half.mean_time_to_first_token,
        _seconds,
    ),
    Figure(
        "time_to_first_token_max_s",
        "time to first token, last user",
        lambda half: half.last_time_to_first_token,
        _seconds,
    ),
    Figure(
        "decode_ms_per_token",
        "decode, per token",
        lambda half: half.decode_ms_per_token,
        _milliseconds,
    ),
    Figure("decode_step_ms", "decode, per step", lambda half: half.step_ms, _milliseconds),
    Figure("kv_bytes", "K/V held at most", lambda half: half.kv_bytes, _mebibytes),
    Figure("seconds", "whole run", lambda half: half.seconds, _seconds),
)


def ratio(figure: Figure, result: DemoResult) -> float | None:
    """Return how many times larger a figure is without sharing, None if it was not measured."""
    shared = figure.value(result.shared)
    return figure.value(result.separate) / shared if shared else None


def ratio_text(figure: Figure, result: DemoResult, unit: str) -> str:
    """Return the ratio for people."""
    value = ratio(figure, result)
    return "not measured" if value is None else f"{value:.1f}{unit}"


def as_figures(result: DemoResult, plot: Path) -> dict[str, Any]:
    """Return the figures as a dictionary that JSON can hold."""
    return {
        "model": result.model,
        "num_users": len(result.inputs.questions),
        "prompt_tokens": result.num_prompt_tokens,
        "shared_prefix_tokens": result.num_shared_tokens,
        "generated_tokens": result.shared.num_generated_tokens,
        "equal_answers": result.num_equal_answers,
        "sharing_on": {figure.key: figure.value(result.shared) for figure in FIGURES},
        "sharing_off": {figure.key: figure.value(result.separate) for figure in FIGURES},
        "ratio_off_to_on": {figure.key: ratio(figure, result) for figure in FIGURES},
        "answers": [output.outputs[0].text for output in result.shared.outputs],
        "tree": result.shared.tree,
        "plot": str(plot),
    }


def print_report(result: DemoResult, plot: Path, console: Console) -> None:
    """Print the table, the prefix tree and where the plot is."""
    num_users = len(result.inputs.questions)
    console.print()
    console.print("[bold]Prefix tree while the answers were written, sharing on[/bold]")
    # On a terminal long lines are cut; in a file there is room for them.
    console.print(
        result.shared.tree,
        markup=False,
        highlight=False,
        no_wrap=console.is_terminal,
        soft_wrap=not console.is_terminal,
    )
    console.print()
    table = Table(title_justify="left", title_style="bold")
    table.title = (
        f"{num_users} users, {result.num_prompt_tokens:,} prompt tokens, the first "
        f"{result.num_shared_tokens:,} of each the same"
    )
    table.add_column("")
    for heading in ("sharing on", "sharing off", "off / on"):
        table.add_column(heading, justify="right")
    for figure in FIGURES:
        table.add_row(
            figure.label,
            figure.text(figure.value(result.shared)),
            figure.text(figure.value(result.separate)),
            ratio_text(figure, result, "x"),
        )
    console.print(table)
    console.print(
        f"Equal answers in both runs: {result.num_equal_answers} of {num_users}.", highlight=False
    )
    console.print(f"Plot: {plot}", highlight=False, soft_wrap=True)
