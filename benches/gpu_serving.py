"""Decode steps of the engine on a CUDA device: `python benches/gpu_serving.py [--out FILE]`.

Llama-2-7B and Llama-3-8B shapes with random float16 weights, 512 tokens generated for each of the
sequences. For each load the mean time of a decode step, sharing on and off in the same process,
beside the floor: weights and distinct K/V, half of the new tokens generated, over the bandwidth of
a plain read that is measured in the run. Then the time to the first token of 32 cached prompts, and
with `--profile` the kernels that a step spends its time in.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from chunkcache.engine import LLM, SamplingParams

CHUNK_SIZE = 64
NUM_GENERATED = 512
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-2-7B": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 8192,
    },
    "Llama-3-8B": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
}


@dataclass(frozen=True)
class Load:
    """Sequences that decode together, and the goal in milliseconds a step."""

    shape: str
    batch: int
    prompt: int
    shared: int
    goal: float
    as_samples: bool = False

    @property
    def name(self) -> str:
        """A label."""
        kind = "samples of one prompt" if self.as_samples else f"{self.shared} shared"
        return f"{self.shape} b{self.batch} {self.prompt}, {kind}"


LOADS = [
    Load("Llama-2-7B", 32, 1024, 1024, 5.0),
    Load("Llama-2-7B", 32, 2048, 2048, 5.2),
    Load("Llama-2-7B", 32, 4096, 4096, 5.5),
    Load("Llama-2-7B", 32, 4096, 0, 20.9),
    Load("Llama-2-7B", 96, 2048, 2048, 7.5),
    Load("Llama-2-7B", 64, 4096, 4096, 6.7, as_samples=True),
    Load("Llama-2-7B", 8, 4096, 4096, 4.6, as_samples=True),
    Load("Llama-3-8B", 64, 4096, 4096, 5.1),
    Load("Llama-3-8B", 64, 4096, 4096, 5.1, as_samples=True),
]


@dataclass(frozen=True)
class Result:
    """Milliseconds of a decode step.

    Attributes:
        sharing: mean of our step, what is shared read once.
        spread: interquartile range over the median.
        unshared: mean with sharing off; None if it was not run.
        floor: weights and distinct K/V over the read bandwidth.
        goal: of the load.
        first_token: seconds to the first token of the last sequence, nothing cached before.
    """

    load: str
    sharing: float
    spread: float
    unshared: float | None
    floor: float
    goal: float
    first_token: float


def make_model(shape: str) -> Any:
    """Return a model of random weights on the device."""
    config = transformers.LlamaConfig(**SHAPES[shape], tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device("cuda"):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.float16)
        try:
            model = transformers.LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(previous)
    return model.eval()


def read_bandwidth() -> float:
    """Return bytes a second of summing 4 GB."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    best = 0.0
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        data.sum()
        end.record()
        end.synchronize()
        best = max(best, 4 * data.numel() / begin.elapsed_time(end) * 1e3)
    return best


def prompts_of(load: Load) -> list[list[int]]:
    """Return prompts whose last token differs where they are shared."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randint(10, 30000, (load.shared,), generator=generator).tolist()
    if load.as_samples:
        return [common]
    if load.shared:
        return [[*common[:-1], 31000 + row] for row in range(load.batch)]
    tails = torch.randint(10, 30000, (load.batch, load.prompt), generator=generator)
    return tails.tolist()


def serve(model: Any, load: Load, sharing: bool, compiled: bool) -> tuple[float, float, float]:
    """Return the mean of a decode step in ms, its spread, and the time to the last first token."""
    shared = load.shared if sharing else 0
    tokens_each = load.prompt - shared + NUM_GENERATED + 2 * CHUNK_SIZE
    chunks = load.batch * -(-tokens_each // CHUNK_SIZE) + shared // CHUNK_SIZE + 8
    llm = LLM(
        model,
        chunk_size=CHUNK_SIZE,
        capacity=chunks,
        max_num_seqs=load.batch,
        max_num_batched_tokens=8192,
        enable_prefix_sharing=sharing,
        compile_model=compiled,
    )
    params = SamplingParams(
        max_tokens=NUM_GENERATED,
        ignore_eos=True,
        n=load.batch if load.as_samples else 1,
        temperature=0.0,
    )
    outputs = [o for r in llm.generate(prompts_of(load), params) for o in r.outputs]
    del llm
    # Its graphs and its arena are in reference cycles.
    gc.collect()
    torch.cuda.empty_cache()
    together = max(output.token_times[0] for output in outputs)
    times = [t for t in outputs[-1].token_times if t > together]
    gaps = [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    low, median, high = statistics.quantiles(gaps, n=4)
    # Steps come in turns of planned and running ones: the mean is what a token costs.
    mean = 1e3 * (times[-1] - times[0]) / (len(times) - 1)
    return mean, (high - low) / median, together


def time_to_first_token(model: Any) -> float:
    """Return the seconds until 32 cached prompts of 4,096 tokens have their first token."""
    load = Load("Llama-2-7B", 32, 4096, 4096, 0.0)
    llm = LLM(
        model, chunk_size=CHUNK_SIZE, capacity=256, max_num_seqs=32, max_num_batched_tokens=8192
    )
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    prompts = prompts_of(load)
    llm.generate(prompts, params)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        llm.generate(prompts, params)
        times.append(time.perf_counter() - begin)
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return statistics.median(times)


def profile(model: Any, load: Load, compiled: bool) -> list[tuple[str, float]]:
    """Return the kernels of a decode step and their microseconds a step."""
    chunks = load.batch * 12 + load.prompt // CHUNK_SIZE + 8
    llm = LLM(
        model,
        chunk_size=CHUNK_SIZE,
        capacity=chunks,
        max_num_seqs=load.batch,
        max_num_batched_tokens=8192,
        compile_model=compiled,
    )
    requests = [
        llm.request(prompt, SamplingParams(max_tokens=100, ignore_eos=True))
        for prompt in prompts_of(load)
    ]
    llm.engine.add(requests)
    while not all(r.output.outputs[0].token_ids for r in requests):
        llm.engine.step()
    steps = 20
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            llm.engine.step()
        torch.cuda.synchronize()
    llm.engine.abort(requests)
    events = profiler.key_averages()
    kernels = sorted(
        ((e.key[:70], e.self_device_time_total / steps) for e in events), key=lambda pair: -pair[1]
    )
    launches = sum(e.count for e in events) / steps
    total = sum(microseconds for _, microseconds in kernels)
    return [(f"all of {launches:.0f} kernels", total), *kernels[:14]]


def measure(load: Load, model: Any, bandwidth: float, *, compare: bool, compiled: bool) -> Result:
    """Run one load."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    token_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    distinct = load.shared + load.batch * (load.prompt - load.shared + NUM_GENERATED // 2)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    # Of the embedding only the rows of the step's tokens are read.
    weights -= model.get_input_embeddings().weight.numel() * 2
    floor = 1e3 * (weights + distinct * token_bytes) / bandwidth
    sharing, spread, first_token = serve(model, load, sharing=True, compiled=compiled)
    unshared = serve(model, load, sharing=False, compiled=compiled)[0] if compare else None
    return Result(load.name, sharing, spread, unshared, floor, load.goal, first_token)


def main() -> None:
    """Run the loads whose name contains `--filter`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--filter", default="", help="only loads whose name contains this")
    parser.add_argument("--compare", action="store_true", help="also with sharing off")
    parser.add_argument("--compiled", action="store_true", help="with compile_model=True")
    parser.add_argument("--profile", action="store_true", help="also the kernels of a step")
    arguments = parser.parse_args()
    bandwidth = read_bandwidth()
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(sys.argv),
        "read_bytes_per_second": bandwidth,
        "loads": [],
    }
    write = sys.stdout.write
    write(f"{torch.cuda.get_device_name()}, read {bandwidth / 1e12:.2f} TB/s; ms a decode step\n")
    for shape in SHAPES:
        loads = [x for x in LOADS if x.shape == shape and arguments.filter in x.name]
        if not loads:
            continue
        model = make_model(shape)
        for load in loads:
            result = measure(
                load, model, bandwidth, compare=arguments.compare, compiled=arguments.compiled
            )
            record["loads"].append(asdict(result))
            unshared = "" if result.unshared is None else f" unshared {result.unshared:6.2f}"
            write(
                f"{result.load:48s} {result.sharing:6.2f} (spread {result.spread:4.0%}){unshared}"
                f" floor {result.floor:5.2f} goal {result.goal:5.1f}"
                f" first tokens {result.first_token:5.2f} s\n"
            )
            sys.stdout.flush()
        if shape == "Llama-2-7B":
            record["cached_first_token_seconds"] = time_to_first_token(model)
            write(f"32 cached prompts, first token: {record['cached_first_token_seconds']:.4f} s\n")
        if arguments.profile:
            record[f"kernels {loads[0].name}"] = profile(model, loads[0], arguments.compiled)
            for name, microseconds in record[f"kernels {loads[0].name}"]:
                write(f"  {microseconds:8.1f} us {name}\n")
        if arguments.out:
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
