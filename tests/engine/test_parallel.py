"""Two processes that share a model: the outputs are those of one."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest

from chunkcache import InvalidConfigError
from chunkcache.engine import LLM, EngineConfig, SamplingParams
from chunkcache.engine.parallel import check_heads
from chunkcache_testing.parallel import random_prompts, save_adapter, serve_cases
from chunkcache_testing.tiny_models import CONFIGS, make_model, make_tokenizer

# Two processes that import torch and transformers, on however many cores there are.
pytestmark = pytest.mark.timeout(300)

SPLIT = ["gemma2", "llama", "qwen2", "qwen3"]
GREEDY = {"max_tokens": 12}
SAMPLED = {"max_tokens": 10, "temperature": 1.0, "seed": 3, "n": 2, "repetition_penalty": 1.2}
GUIDED = {"max_tokens": 30, "guided_regex": "[a-c]{4}(x|yz)", "logprobs": 1}
#: Of the layers that are split by their outputs, by their inputs, and of both.
ADAPTERS = {
    "columns": {"target_modules": ["q_proj", "v_proj", "up_proj"], "r": 4},
    "rows": {"target_modules": ["o_proj", "down_proj"], "r": 4},
    "all": {"target_modules": "all-linear", "r": 8, "use_rslora": True},
}


PROMPTS = random_prompts(3)


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
def adapters(tmp_path_factory) -> dict[str, Path]:
    """A folder for each adapter of the tiny Llama."""
    paths = {}
    for seed, (name, changes) in enumerate(ADAPTERS.items()):
        paths[name] = tmp_path_factory.mktemp(name)
        save_adapter(paths[name], make_model(CONFIGS["llama"]()), seed, **changes)
    return paths


@pytest.fixture(scope="module")
def serve(tmp_path_factory) -> Callable[..., list[dict[str, Any]]]:
    """Let two processes serve cases; return what each of them got."""

    def run(cases: dict[str, Any], codes: tuple[int, int] = (0, 0)) -> list[dict[str, Any]]:
        return serve_cases(tmp_path_factory.mktemp("results"), cases, codes)

    return run


@pytest.fixture(scope="module")
def results(folders, adapters, serve) -> list[dict[str, Any]]:
    """What the two processes got for every case that they survive, each its own."""
    llama = folders["llama"]
    on_llama = {"model": str(llama)}
    return serve(
        {
            **{name: _case(folders[name], GREEDY) for name in SPLIT},
            "unshared": _case(llama, GREEDY, enable_prefix_sharing=False),
            "pieces": _case(llama, GREEDY, max_num_batched_tokens=13, enable_overlap=False),
            "tight": _case(llama, {"max_tokens": 40, "ignore_eos": True}, capacity=8),
            "sampled": _case(llama, SAMPLED),
            "guided": _case(llama, GUIDED),
            "streamed": ("streamed", {**on_llama, "prompts": PROMPTS}),
            "adapted": (
                "adapted",
                {
                    **on_llama,
                    "prompts": PROMPTS,
                    "adapters": {name: str(path) for name, path in adapters.items()},
                },
            ),
            "asynchronous": ("asynchronous", {**on_llama, "prompts": PROMPTS}),
            "soak": ("soak", on_llama),
            "forgotten": ("forgotten", on_llama),
            "phi3": (
                "refusal",
                {"model": str(folders["phi3"]), "options": {"tensor_parallel_size": 2}},
            ),
            "three": ("refusal", {**on_llama, "options": {"tensor_parallel_size": 3}}),
            "arguments differ": ("arguments_differ", on_llama),
        }
    )


@pytest.mark.parametrize("name", [*SPLIT, "unshared", "pieces"])
def test_greedy_text_is_that_of_one_process(results, folders, expect_generated, name) -> None:
    model = make_model(CONFIGS[name if name in CONFIGS else "llama"]())
    for prompt, (tokens,) in zip(PROMPTS, results[0][name]["tokens"], strict=True):
        expect_generated(model, prompt, tokens, GREEDY["max_tokens"])


def test_preempted_text_is_that_of_one_process(results, expect_generated) -> None:
    assert results[0]["tight"]["num_preemptions"] > 0
    for prompt, (tokens,) in zip(PROMPTS, results[0]["tight"]["tokens"], strict=True):
        expect_generated(make_model(CONFIGS["llama"]()), prompt, tokens, 40)


@pytest.mark.parametrize(
    "name",
    [*SPLIT, "unshared", "pieces", "tight", "sampled", "guided", "streamed", "adapted"],
)
def test_all_processes_get_the_same(results, name) -> None:
    assert results[0][name] == results[1][name]


@pytest.mark.parametrize(("name", "params"), [("sampled", SAMPLED), ("guided", GUIDED)])
def test_other_text_is_that_of_one_process(results, folders, name, params) -> None:
    llm = LLM(folders["llama"], chunk_size=16)
    alone = llm.generate(PROMPTS, SamplingParams(**params))
    texts = [[output.text for output in request.outputs] for request in alone]
    assert results[0][name]["texts"] == texts


def test_text_with_an_adapter_is_that_of_one_process(results, adapters, expect_generated) -> None:
    models: dict[str | None, Any] = {None: make_model(CONFIGS["llama"]())}
    for name, path in adapters.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            models[name] = peft.PeftModel.from_pretrained(make_model(CONFIGS["llama"]()), path)
    prompts = [prompt for prompt in PROMPTS for _ in models]
    for prompt, (name, tokens) in zip(prompts, results[0]["adapted"], strict=True):
        expect_generated(models[name], prompt, tokens, GREEDY["max_tokens"])


def test_a_stream_that_is_left_leaves_nothing(results, expect_generated) -> None:
    model = make_model(CONFIGS["llama"]())
    expect_generated(model, PROMPTS[0], results[0]["streamed"], GREEDY["max_tokens"])


@pytest.mark.parametrize("name", SPLIT)
def test_each_process_has_half_of_the_kv_heads(results, name) -> None:
    assert [result[name]["num_kv_heads"] for result in results] == [1, 1]


def test_prefixes_are_shared_as_in_one_process(results) -> None:
    assert results[0]["llama"]["cached_tokens"] == [len(prompt) for prompt in PROMPTS]


def test_callers_of_the_first_process_get_the_text_of_one(results, expect_generated) -> None:
    served = results[0]["asynchronous"]["served"]
    assert served["aborted"] == "abort"
    model = make_model(CONFIGS["llama"]())
    for prompt, (tokens, reason) in zip(PROMPTS * 3, served["tokens"], strict=True):
        assert reason == "length"
        expect_generated(model, prompt, tokens, GREEDY["max_tokens"])


def test_the_others_follow_the_first_process_step_by_step(results) -> None:
    first, second = (result["asynchronous"] for result in results)
    assert first["num_steps"] == second["num_steps"] > 12
    assert first["chunks"] == second["chunks"]
    assert sum(first["chunks"]) == 24


def test_a_crowd_of_callers_leaves_nothing_in_any_process(results) -> None:
    first, second = (result["soak"] for result in results)
    ends = first.pop("ends")
    assert sum(ends.values()) == 100
    assert min(ends[end] for end in ("finished", "cancelled", "aborted", "refused")) > 0
    assert first == second
    assert first["chunks"][2] == 0


def test_those_that_follow_an_engine_that_is_forgotten_end(results) -> None:
    assert [result["forgotten"] for result in results] == ["ended", "ended"]


def test_only_the_first_process_takes_requests(results) -> None:
    assert "this is not the first process" in results[1]["asynchronous"]["served"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("phi3", "transformers' tp_plan for Phi3ForCausalLM leaves 2 of 2 K/V heads"),
        ("three", "there is a process group of 2"),
        ("arguments differ", "max_num_seqs is 8 in the first process and 9 in process 1; allowed"),
    ],
)
def test_what_cannot_be_split_is_refused_everywhere(results, name, reason) -> None:
    assert results[0][name] == results[1][name]
    assert reason in results[0][name]
    assert results[0][name].startswith("InvalidConfigError")


def test_requests_that_differ_end_the_engine_everywhere(folders, serve) -> None:
    case = ("requests_differ", {"model": str(folders["llama"])})
    for result in serve({"differ": case}):
        assert all(
            "process 1 failed: it does not make the first one's calls: max_tokens of request 0 is"
            " 6, not 5" in error
            for error in result["differ"]
        )


def test_picking_that_fails_is_an_error_everywhere(folders, serve) -> None:
    case = ("picking_fails", {"model": str(folders["llama"])})
    for result in serve({"fails": case}):
        assert "picking failed: ZeroDivisionError" in result["fails"][0]
        assert "the processes can only be started again" in result["fails"][1]


def test_a_model_that_fails_in_one_process_ends_the_wait_of_the_other(folders, serve) -> None:
    options = {"model": str(folders["llama"]), "options": {"enable_overlap": False}}
    first, second = serve({"fails": ("step_fails", options)})
    assert "process 1 failed: the model step failed: ZeroDivisionError" in first["fails"]
    assert "the model step failed: ZeroDivisionError" in second["fails"]


def test_a_process_that_dies_is_an_error_in_the_other(folders, serve) -> None:
    options = {"model": str(folders["llama"]), "options": {}}
    first, _ = serve({"dies": ("dies", options)}, codes=(0, 9))
    assert first["dies"].startswith("EngineError")
    assert "process 1 has ended" in first["dies"]


def test_a_process_that_dies_is_an_error_for_every_caller(folders, serve) -> None:
    case = ("asynchronous_loss", {"model": str(folders["llama"])})
    first, _ = serve({"dies": case}, codes=(0, 9))
    assert "process 1 has ended" in first["dies"]


def test_a_process_that_cannot_follow_is_an_error_for_every_caller(folders, serve) -> None:
    first, second = serve({"fails": ("asynchronous_failure", {"model": str(folders["llama"])})})
    assert "process 1 failed: following failed: ZeroDivisionError" in first["fails"]
    assert second["fails"].startswith("ZeroDivisionError")


def test_one_process_is_not_two(folders) -> None:
    with pytest.raises(InvalidConfigError, match="torchrun --nproc-per-node 2"):
        LLM(folders["llama"], tensor_parallel_size=2)


def test_a_particular_device_is_refused(folders) -> None:
    with pytest.raises(InvalidConfigError, match="device is 'cuda:1'; allowed with tensor_par"):
        LLM(folders["llama"], tensor_parallel_size=2, device="cuda:1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile_model": True}, "compile_model is True; allowed with tensor_parallel_size 2 is"),
        (
            {"kv_cache_dtype": "fp8", "k_scale": [[1.0]]},
            "k_scale is a list; allowed with tensor_parallel_size 2 is None or a number",
        ),
    ],
)
def test_what_is_for_whole_models_is_refused(folders, options, message) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        LLM(folders["llama"], tensor_parallel_size=2, **options)


@pytest.mark.parametrize(
    ("name", "value", "given"),
    [
        ("WORLD_SIZE", "x", "in the environment is 'x'; allowed is an int of at least 1"),
        ("WORLD_SIZE", "", "in the environment is ''; allowed is"),
        ("WORLD_SIZE", "0", "in the environment is '0'; allowed is"),
        ("RANK", None, "is not set in the environment; allowed is an int from 0 to 1"),
        ("RANK", "2", "in the environment is '2'; allowed is an int from 0 to 1"),
        ("RANK", "-1", "in the environment is '-1'; allowed is"),
        ("RANK", "1.0", "in the environment is '1.0'; allowed is"),
        ("LOCAL_RANK", "x", "in the environment is 'x'; allowed is an int from 0 to"),
        ("LOCAL_RANK", "99", "in the environment is '99'; allowed is"),
        ("MASTER_PORT", None, "is not set in the environment"),
        ("MASTER_PORT", "70000", "in the environment is '70000'; allowed is"),
        ("MASTER_ADDR", None, "is not set in the environment; allowed is a host"),
    ],
)
def test_a_wrong_environment_is_refused_by_the_variable(
    folders, monkeypatch, name, value, given
) -> None:
    right = {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    for variable, text in {**right, name: value}.items():
        if text is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, text)
    with pytest.raises(InvalidConfigError, match=f"^{name} {given}"):
        LLM(folders["llama"], tensor_parallel_size=2)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="its 4 query heads and 2 K/V heads"):
        check_heads(CONFIGS["llama"](), 4)


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="tensor_parallel_size is 0"):
        EngineConfig(tensor_parallel_size=0)


def test_a_follower_whose_program_ends_says_so(folders, serve) -> None:
    case = {"left": ("follower_leaves", {"model": str(folders["llama"])})}
    first, second = serve(case)
    assert "process 1 failed: its program ended before" in first["left"]
    assert second["left"] == "ended"
