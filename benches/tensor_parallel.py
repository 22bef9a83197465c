"""Decode steps of one model on one CUDA device, and split over several, in one run.

    torchrun --nproc-per-node 2 benches/tensor_parallel.py

A Llama with random weights (TinyLlama's shape by default) serves the same prompts split over all
processes, with recorded steps and without, and then whole on the first one's device. Greedy tokens
are checked first: each has to be transformers' best one, up to the rounding of the dtype.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rich.console import Console

from chunkcache.engine import LLM, SamplingParams

#: How much worse than the best logit a token's may be, in parts of the largest.
TOLERANCE = {"float16": 1e-2, "bfloat16": 4e-2}


def main() -> None:
    """Run and print a table."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        # Each process makes the same weights.
        folder = Path(scratch) / "model"
        _save_model(folder, arguments)
        prompts = _prompts(arguments)
        rows = [
            _measured(folder, prompts, arguments, name, **options)
            for name, options in (
                ("split, recorded", {}),
                ("split, unrecorded", {"enable_cuda_graphs": False}),
            )
        ]
        if dist.get_rank() == 0:
            rows.append(_measured(folder, prompts, arguments, "whole, recorded", whole=True))
            _report(rows, arguments)
        dist.barrier()
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="bfloat16")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 4), metavar=("QO", "KV"))
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512, help="tokens, half of them shared")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _save_model(folder: Path, arguments: argparse.Namespace) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads[0],
        num_key_value_heads=arguments.heads[1],
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device("cuda", int(os.environ["LOCAL_RANK"])):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, arguments.dtype)
        )
    model.save_pretrained(folder)


def _prompts(arguments: argparse.Namespace) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    half = arguments.prompt // 2
    shared = torch.randint(32000, (half,), generator=generator).tolist()
    return [
        shared + torch.randint(32000, (half,), generator=generator).tolist()
        for _ in range(arguments.batch)
    ]


def _measured(
    folder: Path,
    prompts: list[list[int]],
    arguments: argparse.Namespace,
    name: str,
    *,
    whole: bool = False,
    **options: Any,
) -> dict[str, Any]:
    size = 1 if whole else int(os.environ["WORLD_SIZE"])
    begin = time.perf_counter()
    llm = LLM(
        folder,
        device="cuda",
        dtype=arguments.dtype,
        tensor_parallel_size=size,
        max_num_seqs=arguments.batch,
        capacity=2 * arguments.batch * (arguments.prompt + arguments.tokens) // 64,
        **options,
    )
    seconds_to_load = time.perf_counter() - begin
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, progress=False)
    times = []
    for _ in range(3):
        llm.reset_stats()
        llm.generate(prompts, params, progress=False)
        times.append(1e3 * llm.stats.decode_seconds / llm.stats.num_decode_steps)
    llm.check_accounts()
    tokens = [request.outputs[0].token_ids for request in outputs]
    row = {
        "name": name,
        "step_ms": statistics.median(times),
        "spread_ms": max(times) - min(times),
        "seconds_to_load": seconds_to_load,
        "tokens": tokens,
    }
    if whole:
        row["model"] = llm.model
    return row


def _report(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    console = Console(highlight=False)
    model = rows[-1].pop("model")
    prompts = _prompts(arguments)
    for row in rows:
        row["worst"] = _check(model, prompts, row["tokens"], TOLERANCE[arguments.dtype])
        del row["tokens"]
        console.print(
            f"{row['name']:20} {row['step_ms']:7.3f} ms a step (spread {row['spread_ms']:.3f}), "
            f"{row['seconds_to_load']:.1f} s to load, worst token {row['worst']:.1e} below the best"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"arguments": str(arguments), "rows": rows}, indent=1))


def _check(
    model: Any, prompts: list[list[int]], tokens: list[list[int]], tolerance: float
) -> float:
    """Return how much worse the worst token is than the best one at its place."""
    worst = 0.0
    for prompt, answer in zip(prompts, tokens, strict=True):
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        chosen = logits.gather(1, torch.tensor(answer, device=model.device)[:, None])[:, 0]
        missing = (logits.amax(1) - chosen) / logits.abs().amax(1)
        worst = max(worst, float(missing.max()))
    if worst > tolerance:
        raise SystemExit(f"a token is {worst:.1e} below the best one, allowed is {tolerance}")
    return worst


if __name__ == "__main__":
    main()
