"""One process of a tensor-parallel engine: serves the cases of a file and writes what it got.

Usage: python parallel_worker.py CASES RESULTS, with torchrun's environment variables.
"""

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from chunkcache.engine import LLM, SamplingParams

GREEDY = {"max_tokens": 12}


def _served(model: str, prompts: list[list[int]], params: dict[str, Any], options: Any) -> Any:
    llm = LLM(model, chunk_size=16, tensor_parallel_size=dist.get_world_size(), **options)
    outputs = llm.generate(prompts, SamplingParams(**params))
    llm.check_accounts()
    again = llm.generate(prompts, SamplingParams(max_tokens=1))
    return {
        "num_kv_heads": llm.spec.num_kv_heads,
        "num_preemptions": llm.stats.num_preemptions,
        "cached_tokens": [request.cached_tokens for request in again],
        "tokens": [[output.token_ids for output in request.outputs] for request in outputs],
        "texts": [[output.text for output in request.outputs] for request in outputs],
        "logprobs": [request.outputs[0].cumulative_logprob for request in outputs],
    }


def _refusal(model: str, options: Any) -> str:
    try:
        LLM(model, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "served"


def _failure(model: str) -> list[str]:
    """Let picking fail in the first process alone, and then serve again."""
    llm = LLM(model, tensor_parallel_size=dist.get_world_size())
    picker = llm.engine._executor._picker._picker
    pick = picker.pick
    if dist.get_rank() == 0:
        picker.pick = lambda *_: 1 / 0
    messages = []
    try:
        llm.generate([1, 2], SamplingParams(**GREEDY))
    except Exception as error:
        messages.append(f"{type(error).__name__}: {error}")
    picker.pick = pick
    return [*messages, str(len(llm.generate([1, 2], SamplingParams(**GREEDY))[0].outputs))]


def main(cases: str, results: str) -> None:
    """Serve every case."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kinds = {"served": _served, "refusal": _refusal, "failure": _failure}
    with open(cases) as file:
        given = json.load(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Of torch and transformers about each other.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        found = {name: kinds[kind](**arguments) for name, (kind, arguments) in given.items()}
    with open(f"{results}.{dist.get_rank()}", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
