"""How long those who are decoding wait while a long prompt comes in, chunked prefill on and off.

Some requests decode; then a prompt of 8,000 tokens arrives. What counts is the longest time between
two tokens of a request that was decoding already, from the arrival of the prompt to its first
token. The same load is served with chunked prefill, without it, and with it but without planning
beside the computation, in turns, in one process, by one model.

    python benches/prefill_gap.py [--prompt-tokens 8000] [--running 8] [--rounds 3]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from timing import machine

from chunkcache.engine import LLM, SamplingParams
from chunkcache.engine.sequence import Request

_CONTENDERS: dict[str, dict[str, Any]] = {
    "chunked prefill": {},
    "chunked prefill, no overlap": {"enable_overlap": False},
    "whole prompts": {"enable_chunked_prefill": False},
}


@dataclass(frozen=True)
class Sample:
    """One run of the load.

    Attributes:
        longest_gap: seconds between two tokens of a running request, the longest while the prompt
            is computed.
        usual_gap: their median before the prompt comes.
        time_to_first_token: seconds from the prompt's arrival to its first token.
        step_gap: seconds between the end of a step and the start of the next one, mean.
    """

    longest_gap: float
    usual_gap: float
    time_to_first_token: float
    step_gap: float


def measure(llm: LLM, num_running: int, num_prompt_tokens: int, seed: int) -> Sample:
    """Serve the load once."""
    rng = np.random.default_rng(seed)

    def prompt(num_tokens: int) -> list[int]:
        return rng.integers(llm.spec.vocab_size, size=num_tokens).tolist()

    params = SamplingParams(max_tokens=None, ignore_eos=True)
    running = [llm.request(prompt(32), params) for _ in range(num_running)]
    llm.reset_stats()
    llm.engine.add(running)
    while min(len(request.output.outputs[0].token_ids) for request in running) < 12:
        llm.engine.step()
    long = llm.request(prompt(num_prompt_tokens), SamplingParams(max_tokens=1, ignore_eos=True))
    llm.engine.add([long])
    while not long.finished:
        llm.engine.step()
    for _ in range(3):
        llm.engine.step()
    llm.engine.abort(running)
    arrival = long.output.arrival_time
    before = [gap for request in running for end, gap in _gaps(request) if end < arrival]
    during = [gap for request in running for end, gap in _gaps(request) if end >= arrival]
    stats = llm.stats
    return Sample(
        max(during),
        statistics.median(before),
        long.output.time_to_first_token,
        stats.step_gap_seconds / stats.num_step_gaps,
    )


def _gaps(request: Request) -> list[tuple[float, float]]:
    """Return for each token but the first when it came, and how long after the one before."""
    times = [request.output.arrival_time + time for time in request.output.outputs[0].token_times]
    return [(end, end - begin) for begin, end in itertools.pairwise(times)]


def main() -> None:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--running", type=int, default=8, help="requests that are decoding")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, default=Path("benches/results/prefill_gap.json"))
    arguments = parser.parse_args()
    console = Console()
    first = LLM(arguments.model)
    limits = {"capacity": 64 + (arguments.prompt_tokens + 4096) // 64, "max_model_len": None}
    engines = {
        name: LLM(first.model, first.tokenizer, **{**limits, **options})
        for name, options in _CONTENDERS.items()
    }
    samples: dict[str, list[Sample]] = {name: [] for name in engines}
    for number in range(arguments.rounds):
        for name, llm in engines.items():
            llm.cache.clear()
            samples[name].append(
                measure(llm, arguments.running, arguments.prompt_tokens, seed=number)
            )
            console.print(f"{number + 1}/{arguments.rounds} {name}: {samples[name][-1]}")
    table = {
        name: {
            field: statistics.median(getattr(sample, field) for sample in own)
            for field in asdict(own[0])
        }
        for name, own in samples.items()
    }
    for name, row in table.items():
        console.print(
            f"{name}: " + ", ".join(f"{key} {1e3 * value:.1f} ms" for key, value in row.items())
        )
    ratio = table["whole prompts"]["longest_gap"] / table["chunked prefill"]["longest_gap"]
    console.print(f"longest gap, whole prompts over chunked: {ratio:.1f}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "machine": machine(),
        "prompt_tokens": arguments.prompt_tokens,
        "running": arguments.running,
        "medians_s": table,
        "samples_s": {name: [asdict(sample) for sample in own] for name, own in samples.items()},
        "longest_gap_ratio": ratio,
    }
    arguments.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
