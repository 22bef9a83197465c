"""The whole benchmark in virtual time, and its command."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from chunkcache.cli.app import app
from chunkcache.cli.serve_bench import bench as bench_module
from chunkcache.cli.serve_bench.bench import run_bench
from chunkcache.cli.serve_bench.clock import VirtualClock
from chunkcache.cli.serve_bench.contenders import EngineContender
from chunkcache.cli.serve_bench.experiments import requests_of_trial
from chunkcache.cli.serve_bench.report import as_figures, print_report
from chunkcache.cli.serve_bench.turns import server_limits
from chunkcache.cli.serve_bench.workload import Row
from chunkcache.engine.inspection import inspect_model
from chunkcache.errors import ChunkCacheError, InvalidConfigError
from chunkcache_testing.tiny_models import CONFIGS, make_model

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 60, "hash_ids": [1, 2, 3]},
    {"timestamp": 4000, "input_length": 1300, "output_length": 60, "hash_ids": [1, 2, 4]},
]


def run(options, step_seconds: float = 1.0, **more):
    console = Console(file=io.StringIO(), width=200)
    return run_bench(options, console, VirtualClock(step_seconds), **more), console


def figures(options) -> dict:
    result, _ = run(options)
    return as_figures(result, Path("plot.png"))


def test_equal_options_give_equal_figures(make_options) -> None:
    options = make_options(search=True)
    one, other = figures(options), figures(options)
    assert one["experiments"] == other["experiments"]


def test_sharing_saves_memory_and_changes_no_text(make_options) -> None:
    (experiment,) = figures(make_options(rows=(Row(96, 96, 16, 0.4),)))["experiments"]
    on, off = experiment["contenders"]["sharing on"], experiment["contenders"]["sharing off"]
    assert on["runs"][0]["peak_kv_bytes"] < off["runs"][0]["peak_kv_bytes"]
    assert off["comparison"]["num_equal"] == off["comparison"]["num_compared"] > 0


def test_nothing_shared_costs_nothing(make_options) -> None:
    (experiment,) = figures(make_options(rows=(Row(96, 0, 16, 0.4),)))["experiments"]
    on, off = experiment["contenders"].values()
    assert on["runs"] == off["runs"]


def test_every_row_is_an_experiment_scaled(make_options) -> None:
    rows = (Row(64, 0, 16, 0.5), Row(64, 64, 16, 0.5))
    found = figures(make_options(rows=rows, scale=0.5))["experiments"]
    assert [experiment["row"] for experiment in found] == [
        {"n_p": 32, "n_s": 0, "n_c": 8, "rps": 0.5},
        {"n_p": 32, "n_s": 32, "n_c": 8, "rps": 0.5},
    ]


def test_repeats_are_all_kept(make_options) -> None:
    (experiment,) = figures(make_options(repeats=3))["experiments"]
    on = experiment["contenders"]["sharing on"]
    assert len(on["runs"]) == 3
    assert on["spread"] == pytest.approx(0, abs=1e-9)


def test_the_search_keeps_within_the_limit(make_options) -> None:
    # A lone request takes 8 steps for 8 tokens, which is 1,000 ms per token.
    options = make_options(
        search=True, latency_limit_ms=1500, num_requests=12, max_num_seqs=1, max_trials=12
    )
    (experiment,) = figures(options)["experiments"]
    search = experiment["contenders"]["sharing on"]["search"]
    latencies = {
        trial["rps"]: trial["summary"]["normalised_latency_ms"]
        for trial in search["trials"]
        if trial["summary"]
    }
    within = [rps for rps, latency in latencies.items() if latency <= 1500]
    assert search["rps"] == max(within) < search["missed_rps"]


def test_a_searched_rate_is_kept_up_for_the_wanted_time(make_options) -> None:
    options = make_options(search_seconds=20.0)
    spec = inspect_model(make_model(CONFIGS["llama"]()))
    (row,) = options.rows
    few = requests_of_trial(options, spec, row, 0.05)
    many = requests_of_trial(options, spec, row, 2.0)
    assert (len(few), len(many)) == (8, 40)
    assert [request.prompt for request in few] == [request.prompt for request in many[:8]]
    assert [r.arrival / 40 for r in few] == pytest.approx([r.arrival for r in many[:8]])


def test_results_are_handed_out_as_they_come(make_options) -> None:
    seen = []

    def note(result) -> None:
        contenders = result.experiments[-1].contenders.values()
        num_runs = sum(len(contender.summaries) for contender in contenders)
        num_trials = sum(len(c.search.trials) for c in contenders if c.search)
        seen.append((sum(len(c.throughputs) for c in contenders), num_runs, num_trials))

    run(make_options(search=True, max_trials=2, latency_limit_ms=1e6), on_result=note)
    assert seen == [
        *[(1, 0, 0), (2, 0, 0)],
        *[(2, 1, 0), (2, 2, 0)],
        *[(2, 2, 1), (2, 2, 2), (2, 2, 3), (2, 2, 4)],
    ]


def runs_of(console) -> list[str]:
    """Return what the benchmark said that it began."""
    lines = console.file.getvalue().splitlines()
    return [line.split(": ", 1)[1].split(" (")[0] for line in lines]


def test_contenders_take_turns(make_options) -> None:
    _, console = run(make_options(throughput_runs=2, repeats=2, sample=0))
    assert runs_of(console) == [
        *[f"sharing {half}, all at once" for half in ("on", "off", "off", "on")],
        *[f"sharing {half}, arrivals" for half in ("on", "off", "off", "on")],
    ]


def test_trials_of_a_search_take_turns_from_what_each_gets_through(make_options) -> None:
    result, console = run(
        make_options(
            rows=(Row(64, 64, 8, 0.1),),
            search=True,
            sample=0,
            repeats=0,
            max_trials=2,
            latency_limit_ms=1e6,
        )
    )
    (experiment,) = result.experiments
    on, off = experiment.contenders.values()
    assert [c.search.trials[0].rps for c in (on, off)] == [c.throughput_rps for c in (on, off)]
    assert [run.split(", ")[0] for run in runs_of(console)[2:]] == ["sharing on", "sharing off"] * 2


def test_a_rate_that_only_a_batch_over_the_limit_keeps_up_is_not_tried(make_options) -> None:
    # Four prompts computed one after the other make the first wait.
    options = make_options(
        rows=(Row(128, 0, 4, 0.1),),
        contenders=("off",),
        search=True,
        sample=0,
        repeats=0,
        max_num_seqs=4,
        max_trials=1,
        latency_limit_ms=1500,
    )
    result, _ = run(options)
    contender = result.experiments[0].contenders["sharing off"]
    assert contender.throughputs[0].normalised_latency_ms > 1500
    (trial,) = contender.search.trials
    assert trial.rps == pytest.approx(contender.throughput_rps / 1.25)
    assert contender.search.missed_rps in (trial.rps, contender.throughput_rps)


def test_where_the_pools_do_not_fit_together_one_comes_after_the_other(
    make_options, monkeypatch
) -> None:
    open_engines: list[str] = []
    make, close = EngineContender._llm.fget, EngineContender.close

    def made(contender):
        if contender._open_llm is None:
            open_engines.append(contender.name)
            assert len(open_engines) == 1
        return make(contender)

    def closed(contender) -> None:
        open_engines.remove(contender.name)
        close(contender)

    monkeypatch.setattr(EngineContender, "_llm", property(made))
    monkeypatch.setattr(EngineContender, "close", closed)
    monkeypatch.setattr(bench_module, "server_limits", one_at_a_time)
    rows = (Row(32, 0, 4, 0.5), Row(32, 32, 4, 0.5))
    result, console = run(make_options(rows=rows, throughput_runs=0, sample=1))
    assert [line for line in runs_of(console) if line != "comparing outputs"] == [
        *["sharing on, arrivals"] * 2,
        *["sharing off, arrivals"] * 2,
    ]
    for experiment in result.experiments:
        assert experiment.contenders["sharing off"].comparison.equal
    assert open_engines == []


def one_at_a_time(*arguments):
    limits, _ = server_limits(*arguments)
    return limits, 1


def test_what_the_time_limit_leaves_out_is_said(make_options) -> None:
    rows = (Row(32, 0, 8, 1.0), Row(32, 32, 8, 1.0))
    options = make_options(rows=rows, throughput_runs=0, sample=0, time_limit=40.0)
    result, console = run(options)
    first, second = result.experiments
    assert all(len(c.summaries) == 1 for c in first.contenders.values())
    assert not any(c.out_of_time for c in first.contenders.values())
    assert second.contenders["sharing off"].summaries == []
    assert second.contenders["sharing off"].out_of_time
    print_report(result, [], console)
    assert "sharing off: the time limit came before everything" in console.file.getvalue()


def test_a_search_leaves_the_next_row_its_share_of_the_time(make_options) -> None:
    rows = (Row(32, 0, 4, 1.0), Row(32, 32, 4, 1.0))
    options = make_options(
        rows=rows,
        throughput_runs=0,
        repeats=0,
        sample=0,
        search=True,
        max_trials=50,
        tolerance=1e-6,
        latency_limit_ms=2000,
        time_limit=400.0,
    )
    result, _ = run(options)
    for experiment in result.experiments:
        assert all(len(c.search.trials) >= 3 for c in experiment.contenders.values())


def test_different_outputs_end_the_benchmark(make_options, monkeypatch) -> None:
    monkeypatch.setattr(
        EngineContender, "generate", lambda self, requests: [[0] * 8 for _ in requests]
    )
    with pytest.raises(ChunkCacheError, match="sharing off gives other outputs than sharing on"):
        run(make_options())


def test_a_failure_of_transformers_is_a_result(make_options, monkeypatch) -> None:
    class Broken:
        def __init__(self, *arguments: object) -> None:
            self.name = "transformers"

        def generate(self, requests: object) -> None:
            raise RuntimeError("no such kernel")

        def close(self) -> None:
            """Has nothing."""

    monkeypatch.setattr(bench_module, "ContinuousBatching", Broken)
    result, console = run(make_options(contenders=("on", "off", "transformers"), search=True))
    print_report(result, [], console)
    contender = result.experiments[0].contenders["transformers"]
    assert contender.failure == "RuntimeError: no such kernel"
    assert contender.summaries == []
    assert "transformers failed: RuntimeError: no such kernel" in console.file.getvalue()


def test_progress_says_how_much_is_left(make_options) -> None:
    _, console = run(make_options())
    lines = console.file.getvalue().splitlines()
    assert any("sharing on, all at once (0 of 16 requests)" in line for line in lines)
    assert any("sharing off, all at once (4 of 16 requests, about" in line for line in lines)


def test_the_report_names_every_figure(make_options) -> None:
    result, console = run(make_options(search=True))
    print_report(result, [Path("figures.json")], console)
    text = console.file.getvalue()
    for wanted in (
        "64/64/8 at 0.1/s",
        "ms/token",
        "first token, ms",
        "next token, ms",
        "p50/p90/p99",
        "peak K/V",
        "peak",
        "served/s",
        "10000 ms/token",
        "All requests at once:",
        "throughput, on / off",
        "K/V memory saved",
        "agrees with the reference",
        "figures.json",
    ):
        assert wanted in text


def test_the_record_names_machine_versions_command_and_date(make_options) -> None:
    found = figures(make_options())
    assert {"date", "command", "processor", "num_cores", "num_threads", "system"} <= found.keys()
    assert {"chunkcache", "python", "torch", "transformers", "numpy"} == found["versions"].keys()


def test_a_row_longer_than_the_model_is_refused(make_options) -> None:
    with pytest.raises(InvalidConfigError, match=r"row 510/0/8 at 1/s has 518 tokens; .* 512"):
        run(make_options(rows=(Row(510, 0, 8, 1.0),)))


@pytest.mark.parametrize(
    "name", ["speed", "scale", "latency_limit_ms", "tolerance", "search_seconds", "time_limit"]
)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_options_out_of_range_are_refused(make_options, name: str, value: float) -> None:
    with pytest.raises(InvalidConfigError, match=name):
        make_options(**{name: value})


@pytest.mark.parametrize(
    "more", [{"search": False}, {"search": True, "trace": Path("trace.jsonl")}]
)
def test_nothing_to_measure_is_refused(make_options, more: dict) -> None:
    with pytest.raises(InvalidConfigError, match="throughput_runs and repeats are 0"):
        make_options(throughput_runs=0, repeats=0, **more)


@pytest.mark.parametrize("contenders", [(), ("on", "on"), ("vllm",)])
def test_wrong_contenders_are_refused(make_options, contenders: tuple) -> None:
    with pytest.raises(InvalidConfigError, match="contender"):
        make_options(contenders=contenders)


@pytest.fixture
def arguments(model_folder, tmp_path) -> list[str]:
    return [
        *("bench", "serve", "--model", str(model_folder), "--max-num-batched-tokens", "128"),
        *("--chunk-size", "16", "--requests", "2", "--max-trials", "2"),
        *("--search-seconds", "0.1"),
        *("--output", str(tmp_path / "results" / "serve.png")),
    ]


def test_the_command_serves_rows_on_all_contenders(arguments, tmp_path) -> None:
    result = CliRunner().invoke(app, [*arguments, "--row", "32,32,4,50", "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    (experiment,) = found["experiments"]
    assert [*experiment["contenders"]] == ["sharing on", "sharing off", "transformers"]
    assert [c["failure"] for c in experiment["contenders"].values()] == [None] * 3
    assert json.loads((tmp_path / "results" / "serve.json").read_text()) == found
    assert (tmp_path / "results" / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_replays_a_trace(arguments, tmp_path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, MOONCAKE)))
    result = CliRunner().invoke(
        app, [*arguments, "--trace", str(trace), "--speed", "1000", "--scale", "0.1", "--json"]
    )
    assert result.exit_code == 0, result.stderr
    (experiment,) = json.loads(result.stdout)["experiments"]
    assert experiment["format"] == "mooncake"
    assert (experiment["num_prompt_tokens"], experiment["num_output_tokens"]) == (240, 12)
    on, off = (experiment["contenders"][name]["runs"][0] for name in ("sharing on", "sharing off"))
    assert on["num_prompt_tokens_computed"] < off["num_prompt_tokens_computed"] == 240
    assert experiment["contenders"]["sharing on"]["search"] is None


def test_the_command_prints_a_table(arguments) -> None:
    result = CliRunner().invoke(
        app, [*arguments, "--row", "32,32,4,50", "--no-search", "--contender", "on"]
    )
    assert result.exit_code == 0, result.stderr
    assert "sharing on" in result.stdout
    assert "Written:" in result.stdout


def test_a_malformed_trace_is_one_line_and_a_failure(arguments, tmp_path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({**MOONCAKE[0], "input_length": -5}))
    result = CliRunner().invoke(app, [*arguments, "--trace", str(trace)])
    assert result.exit_code == 1
    assert "line 1, field input_length: is -5" in result.stderr
    assert "Traceback" not in result.output


def test_a_gpu_that_is_not_there_is_refused_by_name(arguments, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(app, [*arguments, "--device", "cuda"])
    assert result.exit_code == 1
    assert "device is 'cuda'" in result.stderr


def test_an_engine_that_fails_on_the_gpu_is_refused_with_its_reason(arguments, monkeypatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise ChunkCacheError("no kernels for this device")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("chunkcache.cli.serve_bench.models.random_model", refuse)
    result = CliRunner().invoke(app, [*arguments, "--device", "cuda"])
    assert result.exit_code == 1
    assert "engine does not run on the GPU" in result.stderr
    assert "no kernels for this device" in result.stderr
