"""Two processes of `parallel_worker`, and what they serve."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import peft
import torch

_WORKER = "chunkcache_testing.parallel_worker"
_SECONDS = 250


def serve_cases(
    folder: Path, cases: dict[str, Any], codes: tuple[int, int] = (0, 0), *, on_cuda: bool = False
) -> list[dict[str, Any]]:
    """Let two processes serve cases; return what each of them got.

    Args:
        folder: where cases and results are written.
        cases: a kind and its arguments, by name.
        codes: with which the processes are to end.
        on_cuda: on a CUDA device each, instead of the CPU.
    """
    (folder / "cases").write_text(json.dumps(cases))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if not on_cuda:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # -P: neither the worker's folder nor this one lends its files' names to others' imports.
    command = [sys.executable, "-P", "-m", _WORKER]
    command += [str(folder / "cases"), str(folder / "result")]
    processes = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert tuple(process.returncode for process in processes) == codes, "\n".join(printed)
    files = [folder / f"result.{rank}" for rank in range(2)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def save_adapter(folder: Path, model: Any, seed: int, **changes: Any) -> None:
    """Save a random LoRA adapter of ``model``."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        # peft asks transformers for what will go, and says what it saves.
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(lora_alpha=8, init_lora_weights=False, **changes)
        peft.get_peft_model(model, config).save_pretrained(folder)


def random_prompts(number: int) -> list[list[int]]:
    """Make prompts with a common beginning."""
    return [_random_prompt(40, 0) + _random_prompt(3 + i, 1 + i) for i in range(number)]


def _random_prompt(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(300, (num_tokens,), generator=generator).tolist()
