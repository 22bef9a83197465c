"""The command ``chunkcache bench serve`` and its options."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from chunkcache.errors import ChunkCacheError

_FILE_WIDTH = 120

bench_app = typer.Typer(help="Benchmarks.", no_args_is_help=True)


@bench_app.callback()
def _common() -> None:
    """Benchmarks."""


class Device(StrEnum):
    """Where the model runs."""

    CPU = "cpu"
    CUDA = "cuda"


class Format(StrEnum):
    """How a trace is written."""

    AUTO = "auto"
    MOONCAKE = "mooncake"
    AZURE = "azure"
    AGENT = "agent"


@bench_app.command()
def serve(
    device: Annotated[Device, typer.Option(help="Where to serve.")] = Device.CPU,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model folder, .gguf file, or llama-2-7b-shape for random weights. By default "
            "SmolLM2 on the CPU and llama-2-7b-shape on a GPU."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; by default float32, on a GPU float16."),
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option(
            help="A Poisson workload as n_p,n_s,n_c,rps: prompt tokens, how many of them are "
            "shared, completion tokens, requests per second. May be repeated; by default the "
            "paper's rows, on the CPU with short completions.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Replay a recorded trace instead of Poisson rows."
        ),
    ] = None,
    trace_format: Annotated[
        Format, typer.Option(help="Format of the trace; auto tells by its first line.")
    ] = Format.AUTO,
    speed: Annotated[
        float, typer.Option(help="Seconds of the trace that pass in one second.")
    ] = 1.0,
    scale: Annotated[float, typer.Option(help="Factor of all lengths, of rows and traces.")] = 1.0,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests of a run; of a trace its first ones. By default 12, on a GPU 64, of a "
            "trace all.",
        ),
    ] = None,
    prefixes: Annotated[
        int, typer.Option(min=1, help="Different shared prefixes of a Poisson workload.")
    ] = 1,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="on, off or transformers. May be repeated; by default all three."),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(help="Search the highest rate of a Poisson workload under the limit."),
    ] = True,
    latency_limit: Annotated[
        float | None,
        typer.Option(
            help="Mean normalised latency allowed in the search, in ms per token. By default 300, "
            "on a GPU the paper's 40."
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Precision of the search, as a share.")] = 0.1,
    max_trials: Annotated[int, typer.Option(min=1, help="Runs of a search at most.")] = 8,
    search_seconds: Annotated[
        float,
        typer.Option(
            help="Arrivals of a search's run go on for about so long; there are 8 at least."
        ),
    ] = 30.0,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="Seconds that all may take, from loading the model on. Rows and contenders "
            "share it, and what does not fit is left out."
        ),
    ] = None,
    throughput_runs: Annotated[
        int,
        typer.Option(
            min=0, help="Runs of each contender with all requests there at once, taken in turns."
        ),
    ] = 1,
    repeats: Annotated[
        int,
        typer.Option(min=0, help="Runs of each contender on a workload's arrivals, in turns."),
    ] = 1,
    sample: Annotated[
        int, typer.Option(min=0, help="Requests of a workload whose outputs are compared first.")
    ] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and tokens.")] = 0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = 32,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a step; by default 512, on a GPU 2048."),
    ] = None,
    chunk_size: Annotated[int, typer.Option(help="Tokens of a chunk (page, block).")] = 64,
    capacity_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="K/V pool of each contender; by default as much as is of use."),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(dir_okay=False, help="The plot to write; the JSON goes beside it."),
    ] = Path("chunkcache-serve.png"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")
    ] = False,
) -> None:
    """Serve workloads with prefix sharing, without, and with transformers' own batching."""
    # With --json, standard output belongs to the program that reads it.
    console = Console(stderr=as_json)
    if not console.is_terminal:
        # A file has room for whole tables.
        console = Console(stderr=as_json, width=_FILE_WIDTH)
    try:
        from chunkcache.cli.serve_bench.bench import run_bench
        from chunkcache.cli.serve_bench.clock import WallClock
        from chunkcache.cli.serve_bench.options import CONTENDERS, PROFILES, BenchOptions
        from chunkcache.cli.serve_bench.plot import draw_plot
        from chunkcache.cli.serve_bench.report import as_figures, print_report, write_figures
        from chunkcache.cli.serve_bench.traces import TraceFormat
        from chunkcache.cli.serve_bench.workload import Row

        profile = PROFILES[device.value]
        options = BenchOptions(
            device=device.value,
            model=model or profile.model,
            dtype=dtype or profile.dtype,
            rows=tuple(map(Row.parse, row)) if row else profile.rows,
            trace=trace,
            trace_format=None if trace_format is Format.AUTO else TraceFormat(trace_format.value),
            speed=speed,
            scale=scale,
            num_requests=requests or profile.num_requests,
            max_trace_requests=requests,
            num_prefixes=prefixes,
            seed=seed,
            throughput_runs=throughput_runs,
            repeats=repeats,
            contenders=tuple(contender or CONTENDERS),
            search=search,
            latency_limit_ms=profile.latency_limit_ms if latency_limit is None else latency_limit,
            tolerance=tolerance,
            max_trials=max_trials,
            search_seconds=search_seconds,
            time_limit=time_limit,
            sample=sample,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens or profile.max_num_batched_tokens,
            chunk_size=chunk_size,
            capacity_bytes=capacity_bytes,
        )
        # Before the work, so that a folder that cannot be made is known at once.
        output.parent.mkdir(parents=True, exist_ok=True)

        def keep(result: Any) -> None:
            write_figures(result, output)

        # Kept as it comes: what was measured survives an interruption.
        result = run_bench(options, console, WallClock(), keep)
        draw_plot(result, output)
    except (ChunkCacheError, ModuleNotFoundError, OSError) as error:
        typer.echo(f"chunkcache bench serve: {error}", err=True)
        raise typer.Exit(code=1) from error
    if as_json:
        typer.echo(json.dumps(as_figures(result, output), indent=2, ensure_ascii=False))
    else:
        print_report(result, [output, output.with_suffix(".json")], console)
