"""Two processes that share a model: the outputs are those of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkcache import InvalidConfigError
from chunkcache.engine import LLM, AsyncLLM, EngineConfig, SamplingParams
from chunkcache.engine.parallel import check_heads
from tiny_models import CONFIGS, make_model, make_tokenizer

# Two processes that import torch and transformers, on however many cores there are.
pytestmark = pytest.mark.timeout(300)

WORKER = Path(__file__).parents[1] / "support" / "parallel_worker.py"
SPLIT = ["gemma2", "llama", "qwen2", "qwen3"]
GREEDY = {"max_tokens": 12}
SAMPLED = {"max_tokens": 10, "temperature": 1.0, "seed": 3, "n": 2, "repetition_penalty": 1.2}
GUIDED = {"max_tokens": 30, "guided_regex": "[a-c]{4}(x|yz)", "logprobs": 1}


def _prompt(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(300, (num_tokens,), generator=generator).tolist()


PROMPTS = [_prompt(40, 0) + _prompt(3 + i, 1 + i) for i in range(3)]


def _case(model: Path, params: dict[str, Any], **options: Any) -> tuple[str, dict[str, Any]]:
    arguments = {"model": str(model), "prompts": PROMPTS, "params": params, "options": options}
    return "served", arguments


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder for each kind of model."""
    paths = {}
    for name, config in CONFIGS.items():
        paths[name] = tmp_path_factory.mktemp(name)
        make_model(config()).save_pretrained(paths[name])
        make_tokenizer().save_pretrained(paths[name])
    return paths


@pytest.fixture(scope="module")
def results(folders, tmp_path_factory) -> list[dict[str, Any]]:
    """What the two processes got for every case, each its own."""
    llama = folders["llama"]
    cases = {
        **{name: _case(folders[name], GREEDY) for name in SPLIT},
        "unshared": _case(llama, GREEDY, enable_prefix_sharing=False),
        "pieces": _case(llama, GREEDY, max_num_batched_tokens=13, enable_overlap=False),
        "tight": _case(llama, {"max_tokens": 40, "ignore_eos": True}, capacity=8),
        "sampled": _case(llama, SAMPLED),
        "guided": _case(llama, GUIDED),
        "phi3": (
            "refusal",
            {"model": str(folders["phi3"]), "options": {"tensor_parallel_size": 2}},
        ),
        "three": ("refusal", {"model": str(llama), "options": {"tensor_parallel_size": 3}}),
        "adapters": (
            "refusal",
            {
                "model": str(llama),
                "options": {"tensor_parallel_size": 2, "lora_adapters": {"a": "a"}},
            },
        ),
        "failure": ("failure", {"model": str(llama)}),
    }
    folder = tmp_path_factory.mktemp("results")
    (folder / "cases").write_text(json.dumps(cases))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(WORKER), str(folder / "cases"), str(folder / "result")]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **together, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=250)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0, 0], "\n".join(printed)
    return [json.loads((folder / f"result.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", [*SPLIT, "unshared", "pieces"])
def test_greedy_text_is_that_of_one_process(results, folders, expect_generated, name) -> None:
    model = make_model(CONFIGS[name if name in CONFIGS else "llama"]())
    for prompt, (tokens,) in zip(PROMPTS, results[0][name]["tokens"], strict=True):
        expect_generated(model, prompt, tokens, GREEDY["max_tokens"])


def test_preempted_text_is_that_of_one_process(results, expect_generated) -> None:
    assert results[0]["tight"]["num_preemptions"] > 0
    for prompt, (tokens,) in zip(PROMPTS, results[0]["tight"]["tokens"], strict=True):
        expect_generated(make_model(CONFIGS["llama"]()), prompt, tokens, 40)


@pytest.mark.parametrize("name", [*SPLIT, "unshared", "pieces", "tight", "sampled", "guided"])
def test_all_processes_get_the_same(results, name) -> None:
    assert results[0][name] == results[1][name]


@pytest.mark.parametrize(("name", "params"), [("sampled", SAMPLED), ("guided", GUIDED)])
def test_other_text_is_that_of_one_process(results, folders, name, params) -> None:
    llm = LLM(folders["llama"], chunk_size=16)
    alone = llm.generate(PROMPTS, SamplingParams(**params))
    texts = [[output.text for output in request.outputs] for request in alone]
    assert results[0][name]["texts"] == texts


@pytest.mark.parametrize("name", SPLIT)
def test_each_process_has_half_of_the_kv_heads(results, name) -> None:
    assert [result[name]["num_kv_heads"] for result in results] == [1, 1]


def test_prefixes_are_shared_as_in_one_process(results) -> None:
    assert results[0]["llama"]["cached_tokens"] == [len(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("phi3", "transformers' tp_plan for Phi3ForCausalLM leaves 2 of 2 K/V heads"),
        ("three", "there is a process group of 2"),
        ("adapters", "lora_adapters are given with tensor_parallel_size 2"),
    ],
)
def test_what_cannot_be_split_is_refused_everywhere(results, name, reason) -> None:
    assert results[0][name] == results[1][name]
    assert reason in results[0][name]


def test_a_failure_of_the_first_process_reaches_all_and_ends_nothing_else(results) -> None:
    assert [result["failure"][1] for result in results] == ["1", "1"]
    assert all("division by zero" in result["failure"][0] for result in results)


def test_one_process_is_not_two(folders) -> None:
    with pytest.raises(InvalidConfigError, match="torchrun --nproc-per-node 2"):
        LLM(folders["llama"], tensor_parallel_size=2)


def test_a_whole_model_is_not_in_two_parts(llama) -> None:
    with pytest.raises(InvalidConfigError, match="the loaded model is in 1 parts; allowed is 1"):
        LLM(llama, tensor_parallel_size=2)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="its 4 query heads and 2 K/V heads"):
        check_heads(CONFIGS["llama"](), 4)


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="tensor_parallel_size is 0"):
        EngineConfig(tensor_parallel_size=0)


def test_the_asynchronous_engine_refuses_it(folders) -> None:
    with pytest.raises(InvalidConfigError, match="tensor_parallel_size is 2; allowed is 1, since"):
        AsyncLLM(folders["llama"], tensor_parallel_size=2)
