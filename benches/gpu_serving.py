"""Decode steps of the engine on a CUDA device: `python benches/gpu_serving.py [--out FILE]`.

Llama-2-7B and Llama-3-8B shapes with random float16 weights, 512 tokens generated for each of the
sequences. For each load the mean time of a decode step beside the floor: weights and distinct K/V,
half of the new tokens generated, over the bandwidth of a plain read that is measured in the run;
what the last steps' time goes to; and with `--compare` the step without sharing, half of the new
tokens generated (without sharing, samples of one prompt are as other prompts). Then the gap between
steps on the device with the overlap of planning and without, and the time to the first token of 32
cached prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from step_profile import Profile, watch

from chunkcache import KernelError
from chunkcache.engine import LLM, SamplingParams

# Prompts share whole chunks: of 4,095 equal tokens 4,064, with chunks of 64 only 4,032.
CHUNK_SIZE = 32
NUM_GENERATED = 512
PROFILED_STEPS = 16
# Those of the profile come after the others.
MOST_GENERATED = NUM_GENERATED + 2 * PROFILED_STEPS
UNSHARED_STEPS = 64
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
        unshared: mean with sharing off, with half of the tokens generated; None if it was not run.
        profile: what a step's time goes to, in microseconds, with all tokens generated.
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
    profile: dict[str, Any]


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


def num_chunks(load: Load, num_generated: int, sharing: bool) -> int:
    """Return how many chunks a load takes."""
    shared = load.shared if sharing else 0
    tokens_each = load.prompt - shared + num_generated + 2 * CHUNK_SIZE
    return load.batch * -(-tokens_each // CHUNK_SIZE) + shared // CHUNK_SIZE + 8


def make_llm(model: Any, loads: list[Load], num_generated: int, **config: Any) -> LLM:
    """Return an engine with room for each of the loads."""
    sharing = config.get("enable_prefix_sharing", True)
    return LLM(
        model,
        chunk_size=CHUNK_SIZE,
        capacity=max(num_chunks(load, num_generated, sharing) for load in loads),
        max_num_seqs=max(load.batch for load in loads),
        max_num_batched_tokens=8192,
        **config,
    )


def requests_of(llm: LLM, load: Load, num_generated: int) -> list[Any]:
    """Return the load's requests, for as many tokens each."""
    params = SamplingParams(
        max_tokens=num_generated,
        ignore_eos=True,
        n=load.batch if load.as_samples else 1,
        temperature=0.0,
    )
    return [llm.request(prompt, params) for prompt in prompts_of(load)]


def begin(llm: LLM, requests: list[Any], num_tokens: int = 1) -> None:
    """Run until all sequences have so many tokens."""
    llm.engine.add(requests)
    sequences = [sequence for request in requests for sequence in request.sequences]
    while min(len(sequence.output.token_ids) for sequence in sequences) < num_tokens:
        llm.engine.step()


def forget(llm: LLM) -> None:
    """Give an engine's memory back, when the caller has dropped it, too."""
    llm.engine.settle()
    del llm
    # Its graphs and its arena are in reference cycles.
    gc.collect()
    torch.cuda.empty_cache()


def step_times(requests: list[Any]) -> tuple[float, float, float]:
    """Return the mean of a decode step in ms, its spread, and the time to the last first token."""
    outputs = [output for request in requests for output in request.output.outputs]
    together = max(output.token_times[0] for output in outputs)
    times = [t for t in outputs[-1].token_times if t > together]
    gaps = [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    low, median, high = statistics.quantiles(gaps, n=4)
    # Steps come in turns of planned and running ones: the mean is what a token costs.
    mean = 1e3 * (times[-1] - times[0]) / (len(times) - 1)
    return mean, (high - low) / median, together


def end(llm: LLM, requests: list[Any]) -> None:
    """End requests, and forget what they left in the cache."""
    llm.engine.abort(requests)
    llm.engine.settle()
    llm.cache.clear()


def serve(llm: LLM, load: Load) -> tuple[float, float, float, Profile]:
    """Return what `step_times` does, and the profile of the steps that follow."""
    requests = requests_of(llm, load, MOST_GENERATED)
    begin(llm, requests, NUM_GENERATED)
    times = step_times(requests)
    profile = watch(llm.engine.step, PROFILED_STEPS)
    end(llm, requests)
    return *times, profile


def half_way(load: Load) -> Load:
    """Return a load whose prompts have half of the new tokens already, but for a few."""
    length = load.prompt + NUM_GENERATED // 2 - UNSHARED_STEPS // 2
    return dataclasses.replace(load, prompt=length, shared=length)


def serve_unshared(model: Any, loads: list[Load], compiled: bool) -> dict[str, float]:
    """Return the mean of a decode step in ms half way, sharing off, by the load's name."""
    llm = make_llm(
        model,
        [half_way(load) for load in loads],
        UNSHARED_STEPS,
        compile_model=compiled,
        enable_prefix_sharing=False,
    )
    means = {}
    for load in loads:
        requests = requests_of(llm, half_way(load), UNSHARED_STEPS)
        begin(llm, requests, UNSHARED_STEPS)
        means[load.name] = step_times(requests)[0]
        end(llm, requests)
        sys.stdout.write(f"{load.name:48s} {means[load.name]:6.2f} with sharing off\n")
        sys.stdout.flush()
    forget(llm)
    return means


def times_to_first_token(llm: LLM) -> list[float]:
    """Return, ten times, the seconds to the first token of 32 cached prompts of 4,096 tokens."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    prompts = prompts_of(Load("Llama-2-7B", 32, 4096, 4096, 0.0))
    llm.generate(prompts, params)
    times = []
    for _ in range(10):
        before = time.perf_counter()
        llm.generate(prompts, params)
        times.append(time.perf_counter() - before)
    llm.cache.clear()
    return times


def watch_gap(llm: LLM, load: Load) -> Profile:
    """Return the steps of a load on the device, as they follow each other."""
    requests = requests_of(llm, load, NUM_GENERATED)
    begin(llm, requests, 20)
    profile = watch(llm.engine.step, 2 * PROFILED_STEPS)
    end(llm, requests)
    return profile


def measure(load: Load, llm: LLM, bandwidth: float) -> Result:
    """Run one load."""
    config = llm.model.config
    head_dim = config.hidden_size // config.num_attention_heads
    token_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    distinct = load.shared + load.batch * (load.prompt - load.shared + NUM_GENERATED // 2)
    weights = sum(p.numel() * p.element_size() for p in llm.model.parameters())
    # Of the embedding only the rows of the step's tokens are read.
    weights -= llm.model.get_input_embeddings().weight.numel() * 2
    floor = 1e3 * (weights + distinct * token_bytes) / bandwidth
    mean, spread, first_token, profile = serve(llm, load)
    return Result(load.name, mean, spread, None, floor, load.goal, first_token, profile._asdict())


def gaps(model: Any, llm: LLM, load: Load) -> dict[str, Any]:
    """Return the steps on the device with planning beside them and without."""
    found = {"load": load.name, "overlap": watch_gap(llm, load)._asdict()}
    other = make_llm(model, [load], NUM_GENERATED, enable_overlap=False)
    found["no overlap"] = watch_gap(other, load)._asdict()
    forget(other)
    for name in ("overlap", "no overlap"):
        step, gap = found[name]["step"], found[name]["gap"]
        sys.stdout.write(f"{name}: step {step:.0f} us, gap between steps {gap:.0f} us\n")
    return found


def run_shape(
    shape: str, loads: list[Load], bandwidth: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Run the loads of one shape, and write them as they come."""
    write = sys.stdout.write
    model = make_model(shape)
    llm = make_llm(model, loads, MOST_GENERATED, compile_model=arguments.compiled)
    results = []
    for load in loads:
        result = measure(load, llm, bandwidth)
        results.append(result)
        write(
            f"{result.load:48s} {result.sharing:6.2f} (spread {result.spread:4.0%})"
            f" floor {result.floor:5.2f} ({result.sharing / result.floor:.2f}) goal"
            f" {result.goal:5.1f}, first tokens {result.first_token:5.2f} s\n"
        )
        parts = ", ".join(f"{name} {us:.0f}" for name, us in result.profile["parts"].items())
        write(f"  {result.profile['kernels']:.0f} kernels, us: {parts}\n")
        sys.stdout.flush()
    record: dict[str, Any] = {}
    if shape == "Llama-2-7B":
        record["cached_first_token_seconds"] = times_to_first_token(llm)
        median = statistics.median(record["cached_first_token_seconds"])
        write(f"32 cached prompts, first token: {median:.4f} s\n")
        record["gaps"] = gaps(model, llm, loads[0])
    sys.stdout.flush()
    forget(llm)
    del llm
    compared = [load for load in loads if load.shared and not load.as_samples]
    means: dict[str, float] = {}
    if arguments.compare and compared:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            means = serve_unshared(model, compared, arguments.compiled)
        except (KernelError, torch.OutOfMemoryError) as error:
            write(f"with sharing off it does not fit: {error}\n")
    record["loads"] = [
        dataclasses.asdict(dataclasses.replace(result, unshared=means.get(result.load)))
        for result in results
    ]
    return record


def main() -> None:
    """Run the loads whose name contains `--filter`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--filter", default="", help="only loads whose name contains this")
    parser.add_argument("--compare", action="store_true", help="also with sharing off")
    parser.add_argument("--compiled", action="store_true", help="with compile_model=True")
    arguments = parser.parse_args()
    bandwidth = read_bandwidth()
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(sys.argv),
        "read_bytes_per_second": bandwidth,
    }
    sys.stdout.write(
        f"{torch.cuda.get_device_name()}, read {bandwidth / 1e12:.2f} TB/s; ms a decode step\n"
    )
    for shape in SHAPES:
        loads = [x for x in LOADS if x.shape == shape and arguments.filter in x.name]
        if loads:
            record[shape] = run_shape(shape, loads, bandwidth, arguments)
            gc.collect()
            torch.cuda.empty_cache()
        if arguments.out:
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
