"""The commands and their options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import chunkcache
from chunkcache.cli.serve_bench.command import bench_app
from chunkcache.errors import ChunkCacheError

app = typer.Typer(
    help="Shared-prefix K/V cache with two-phase attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(chunkcache.__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Shared-prefix K/V cache with two-phase attention."""


@app.command()
def demo(
    prompt: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="System prompt, instead of the demo's own."),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Questions of the users, one per line."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder or .gguf file, instead of SmolLM2.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    output: Annotated[Path, typer.Option(dir_okay=False, help="The plot to write.")] = Path(
        "chunkcache-demo.png"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")
    ] = False,
) -> None:
    """Serve many users behind one system prompt, with prefix sharing and without."""
    # With --json, standard output belongs to the program that reads it.
    console = Console(stderr=as_json)
    try:
        from chunkcache.cli.demo.inputs import load_inputs
        from chunkcache.cli.demo.plot import draw_plot
        from chunkcache.cli.demo.report import as_figures, print_report
        from chunkcache.cli.demo.serve import serve_both_ways

        inputs = load_inputs(prompt, questions)
        # Before the work, so that a folder that cannot be made is known at once.
        output.parent.mkdir(parents=True, exist_ok=True)
        result = serve_both_ways(inputs, model, max_tokens, console)
        draw_plot(result, output)
    except (ChunkCacheError, ModuleNotFoundError, OSError, UnicodeDecodeError) as error:
        typer.echo(f"chunkcache demo: {error}", err=True)
        raise typer.Exit(code=1) from error
    if as_json:
        typer.echo(json.dumps(as_figures(result, output), indent=2, ensure_ascii=False))
    else:
        print_report(result, output, console)


@app.command()
def tune(
    device: Annotated[int, typer.Option(min=0, help="CUDA device number.")] = 0,
) -> None:
    """Measure the constants of a CUDA device that attention is planned by, and keep them."""
    from dataclasses import asdict

    try:
        from chunkcache.kernels.costs import device_name, keep_costs
        from chunkcache.kernels.tune import tune as measure

        costs = measure(
            device, lambda found, share: typer.echo(f"{share:6.1%} of the time: {asdict(found)}")
        )
        path = keep_costs(device_name(device), costs)
    except (ChunkCacheError, ModuleNotFoundError, OSError) as error:
        typer.echo(f"chunkcache tune: {error}", err=True)
        raise typer.Exit(code=1) from error
    typer.echo(f"kept in {path}; new processes take them")
