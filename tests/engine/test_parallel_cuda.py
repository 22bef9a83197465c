"""Two processes that share a model, each on its own CUDA device."""

from pathlib import Path
from typing import Any

import pytest

from chunkcache_testing.devices import NEEDS_TWO_DEVICES
from chunkcache_testing.parallel import random_prompts, save_adapter, serve_cases
from chunkcache_testing.tiny_models import CONFIGS, make_model

pytestmark = [
    pytest.mark.timeout(300),
    NEEDS_TWO_DEVICES,
]

#: Largest error of a row's logits over their largest, against the whole model's in float16.
TOLERANCE = 2e-2
OPTIONS: dict[str, dict[str, Any]] = {
    "recorded": {},
    "unrecorded": {"enable_cuda_graphs": False},
    "one after another": {"enable_overlap": False},
}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> dict[str, Any]:
    """A model with heads as wide as the kernels want them, two adapters of it, and prompts."""
    folder = tmp_path_factory.mktemp("model")
    config = CONFIGS["llama"]()
    config.head_dim = 64
    model = make_model(config)
    model.save_pretrained(folder)
    adapters = {}
    for seed, modules in enumerate((["q_proj", "up_proj"], ["o_proj", "down_proj"])):
        path: Path = tmp_path_factory.mktemp("adapter")
        save_adapter(path, make_model(config), seed, target_modules=modules, r=4)
        adapters[str(seed)] = str(path)
    return {"model": str(folder), "prompts": random_prompts(4), "adapters": adapters}


@pytest.fixture(scope="module")
def results(arguments, tmp_path_factory) -> list[dict[str, Any]]:
    """What the two processes got with each of the options, each its own."""
    cases = {
        name: ("on_devices", {**arguments, "options": options}) for name, options in OPTIONS.items()
    }
    return serve_cases(tmp_path_factory.mktemp("results"), cases, on_cuda=True)


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_are_those_of_the_whole_model(results, name) -> None:
    first, second = (result[name] for result in results)
    assert first["tokens"] == second["tokens"]
    assert max(first["errors"]) <= TOLERANCE


def test_each_process_has_a_device_and_half_of_the_heads(results) -> None:
    assert [result["recorded"]["device"] for result in results] == ["cuda:0", "cuda:1"]
    assert [result["recorded"]["num_kv_heads"] for result in results] == [1, 1]


@pytest.mark.parametrize("kind", ["dies", "asynchronous_loss"])
def test_a_process_that_dies_is_an_error_in_the_other(arguments, tmp_path, kind) -> None:
    case = (kind, {"model": arguments["model"], **({"options": {}} if kind == "dies" else {})})
    first, _ = serve_cases(tmp_path, {"dies": case}, codes=(0, 9), on_cuda=True)
    assert "process 1 has ended" in first["dies"]
