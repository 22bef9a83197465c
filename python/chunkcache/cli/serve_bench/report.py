"""The benchmark's figures, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chunkcache.cli.serve_bench.goals import Goal, goals_of
from chunkcache.cli.serve_bench.metrics import Percentiles, Summary
from chunkcache.cli.serve_bench.results import BenchResult, ContenderResult, ExperimentResult
from chunkcache.cli.serve_bench.search import SearchResult

NOT_MEASURED = "-"


def as_figures(result: BenchResult, plot: Path) -> dict[str, Any]:
    """Return the figures as a dictionary that JSON can hold."""
    return {
        **result.machine,
        "options": result.options,
        "experiments": [
            {
                "label": experiment.experiment.label,
                **experiment.experiment.origin,
                "contenders": {
                    name: contender.record() for name, contender in experiment.contenders.items()
                },
                "goals": [goal.record() for goal in goals_of(experiment)],
            }
            for experiment in result.experiments
        ],
        "plot": str(plot),
    }


def write_figures(result: BenchResult, plot: Path) -> Path:
    """Write the figures as JSON beside the plot, and return where."""
    path = plot.with_suffix(".json")
    path.write_text(
        json.dumps(as_figures(result, plot), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return path


def print_report(result: BenchResult, files: list[Path], console: Console) -> None:
    """Print the table, the goals, the failures and where the files are."""
    limit = result.options["latency_limit_ms"]
    console.print()
    console.print(_table(result, _LATENCY_COLUMNS))
    console.print(_table(result, _load_columns(limit)))
    if any(c.throughputs for e in result.experiments for c in e.contenders.values()):
        console.print("All requests at once:")
        console.print(_table(result, _AT_ONCE_COLUMNS))
    for experiment in result.experiments:
        for line in _notes(experiment):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    versions = ", ".join(f"{k} {v}" for k, v in result.machine["versions"].items())
    for line in (
        f"{result.machine['processor']}, {result.machine['num_cores']} cores, "
        f"{result.machine['num_threads']} threads, load {result.machine['load_average']}; "
        f"{versions}; {result.machine['date']}",
        *(f"Written: {path}" for path in files),
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(result: BenchResult, columns: Sequence[Column]) -> Table:
    table = Table()
    table.add_column("n_p/n_s/n_c")
    table.add_column("")
    for column in columns:
        table.add_column(column.heading, justify="right")
    for experiment in result.experiments:
        for index, (name, contender) in enumerate(experiment.contenders.items()):
            table.add_row(
                experiment.experiment.label.replace(" ", "\n", 1) if index == 0 else "",
                name,
                *(column.text(contender) for column in columns),
                end_section=index == len(experiment.contenders) - 1,
            )
    return table


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        heading: its name.
        text: the cell of a contender.
    """

    heading: str
    text: Callable[[ContenderResult], str]


def _of_summary(text: Callable[[Summary], str]) -> Callable[[ContenderResult], str]:
    """Return a cell's text from the typical run, if there is one."""

    def cell(contender: ContenderResult) -> str:
        return NOT_MEASURED if contender.typical is None else text(contender.typical)

    return cell


def _at_once(text: Callable[[Summary], str]) -> Callable[[ContenderResult], str]:
    """Return a cell's text from the typical run with all requests at once, if there is one."""

    def cell(contender: ContenderResult) -> str:
        run = contender.typical_throughput
        return NOT_MEASURED if run is None else text(run)

    return cell


def _latency(contender: ContenderResult) -> str:
    if contender.latency_ms is None:
        return NOT_MEASURED if contender.failure is None else "failed"
    text = f"{contender.latency_ms:.1f}"
    return text if contender.spread is None else f"{text} ±{50 * contender.spread:.0f} %"


def _percentiles(values: Percentiles | None) -> str:
    if values is None:
        return NOT_MEASURED
    return f"{values.p50:,.0f}/{values.p90:,.0f}/{values.p99:,.0f}"


def _first_token(summary: Summary) -> str:
    return _percentiles(summary.time_to_first_token)


def _next_token(summary: Summary) -> str:
    return _percentiles(summary.inter_token_latency)


def _bytes(num_bytes: int) -> str:
    if num_bytes < 10 * 2**20:
        return f"{num_bytes / 2**10:,.0f} KiB"
    return f"{num_bytes / 2**20:,.0f} MiB"


def _rate(search: SearchResult | None) -> str:
    """Return the rate found, and the lowest that was too much."""
    if search is None:
        return NOT_MEASURED
    if search.rps == 0:
        return f"< {search.missed_rps:.3g}"
    if search.is_highest:
        return f"{search.rps:.3g}"
    if search.missed_rps is None:
        return f">= {search.rps:.3g}"
    return f"{search.rps:.3g} (< {search.missed_rps:.3g})"


def _throughput(contender: ContenderResult) -> str:
    if contender.throughput_rps is None:
        return NOT_MEASURED
    text = f"{contender.throughput_rps:.3g}"
    spread = contender.throughput_spread
    return text if spread is None else f"{text} ±{50 * spread:.1f} %"


_LATENCY_COLUMNS = (
    Column("ms/token", _latency),
    Column("first token, ms\np50/p90/p99", _of_summary(_first_token)),
    Column("next token, ms\np50/p90/p99", _of_summary(_next_token)),
)


_AT_ONCE_COLUMNS = (
    Column("requests/s", _throughput),
    Column("ms/token", _at_once(lambda s: f"{s.normalised_latency_ms:.1f}")),
    Column("first token, ms\np50/p90/p99", _at_once(_first_token)),
    Column("next token, ms\np50/p90/p99", _at_once(_next_token)),
    Column("peak K/V", _at_once(lambda s: _bytes(s.peak_kv_bytes))),
    Column("peak\nbatch", _at_once(lambda s: str(s.peak_batch))),
)


def _load_columns(limit: float) -> tuple[Column, ...]:
    return (
        Column("peak K/V", _of_summary(lambda s: _bytes(s.peak_kv_bytes))),
        Column("peak\nbatch", _of_summary(lambda s: str(s.peak_batch))),
        Column("served/s", _of_summary(lambda s: f"{s.requests_per_second:.3g}")),
        Column(f"requests/s within\n{limit:g} ms/token", lambda c: _rate(c.search)),
    )


def _notes(result: ExperimentResult) -> list[str]:
    label = result.experiment.label
    lines = []
    for name, contender in result.contenders.items():
        if contender.failure is not None:
            lines.append(f"{label}: {name} failed: {contender.failure}")
        if contender.out_of_time:
            lines.append(f"{label}: {name}: the time limit came before everything was measured")
        if contender.comparison is not None:
            compared = contender.comparison
            lines.append(
                f"{label}: {name} agrees with the reference in {compared.num_equal} of "
                f"{compared.num_compared} tokens of the sample"
            )
    goals = [_goal(goal) for goal in goals_of(result)]
    return [*lines, f"{label}: {'; '.join(goals)}"] if goals else lines


def _goal(goal: Goal) -> str:
    text = f"{goal.name} {_number(goal.value, is_share=goal.is_share)}"
    if goal.least is not None and goal.most is not None:
        text += f" (between {goal.least:.2f} and {goal.most:.2f})"
    if goal.wanted is None:
        return text
    verdict = "met" if goal.is_met else "missed"
    return f"{text} (goal {_number(goal.wanted, is_share=goal.is_share)}: {verdict})"


def _number(value: float, *, is_share: bool) -> str:
    return f"{100 * value:.1f} %" if is_share else f"{value:.2f}"
