"""Several LoRA adapters at once, each as peft runs it alone, and nothing shared between them."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import peft
import pytest
import torch

from chunkcache import InvalidConfigError
from chunkcache.engine import LLM, SamplingParams, lora
from chunkcache_testing.tiny_models import CONFIGS, make_model

MAX_TOKENS = 12
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
NAMES = [None, "a", "b"]
CONFIG: dict[str, Any] = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
ADAPTERS = {
    "a": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "b": {
        "target_modules": "all-linear",
        "r": 8,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2},
    },
}


def _save(path: Path, seed: int, **changes: Any) -> None:
    """Save a random adapter of the tiny Llama."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        # peft asks transformers for what will go, and says what it saves.
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(**{**CONFIG, **changes})
        peft.get_peft_model(make_model(CONFIGS["llama"]()), config).save_pretrained(path)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    """The adapters' folders."""
    folders = {}
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        folders[name] = tmp_path_factory.mktemp(name)
        _save(folders[name], seed, **config)
    return folders


@pytest.fixture(scope="module")
def alone(paths) -> dict[str | None, Any]:
    """For each name the model that peft makes."""
    models: dict[str | None, Any] = {None: make_model(CONFIGS["llama"]())}
    for name, path in paths.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            models[name] = peft.PeftModel.from_pretrained(make_model(CONFIGS["llama"]()), path)
    return models


def _tokens(outputs) -> list[list[int]]:
    return [output.token_ids for request in outputs for output in request.outputs]


@pytest.mark.parametrize("options", [{}, {"enable_prefix_sharing": False}, {"capacity": 24}])
def test_each_request_gets_what_peft_generates(
    llama, paths, alone, make_prompt, expect_generated, options
) -> None:
    llm = LLM(llama, lora_adapters=paths, chunk_size=16, max_num_batched_tokens=50, **options)
    # Equal and similar prompts, so that anything that is shared wrongly shows.
    prompts = [make_prompt(4 * i, seed=i, prefix=make_prompt(40)) for i in range(3)]
    pairs = [(prompt, name) for prompt in prompts for name in NAMES] * 2
    outputs = llm.generate(
        [prompt for prompt, _ in pairs], PARAMS, lora=[name for _, name in pairs]
    )
    for (prompt, name), tokens in zip(pairs, _tokens(outputs), strict=True):
        expect_generated(alone[name], prompt, tokens, MAX_TOKENS)
    assert len({tuple(tokens) for tokens in _tokens(outputs[:3])}) == 3


def test_nothing_is_shared_between_adapters(llama, paths, make_prompt) -> None:
    llm = LLM(llama, lora_adapters=paths, chunk_size=16)
    first = [llm.generate(make_prompt(64), PARAMS, lora=name)[0].cached_tokens for name in NAMES]
    again = [llm.generate(make_prompt(64), PARAMS, lora=name)[0].cached_tokens for name in NAMES]
    assert (first, again) == ([0, 0, 0], [64, 64, 64])


def test_samples_and_prompt_logprobs_are_the_adapters(llama, paths, alone, make_prompt) -> None:
    prompt = make_prompt(20)
    params = SamplingParams(max_tokens=3, n=2, temperature=1.0, seed=1, prompt_logprobs=0)
    llm = LLM(llama, lora_adapters=paths, chunk_size=16)
    for name in ("a", "a", "b"):
        request = llm.generate(prompt, params, lora=name)[0]
        with torch.inference_mode():
            logits = alone[name](torch.tensor([prompt])).logits[0].double()
        expected = logits.log_softmax(dim=-1)[range(19), prompt[1:]].tolist()
        given = [
            entry[token].logprob
            for entry, token in zip(request.prompt_logprobs[1:], prompt[1:], strict=True)
        ]
        assert given == pytest.approx(expected, abs=1e-4)


def test_the_model_is_left_as_it_was(llama, paths) -> None:
    ids = torch.tensor([[1, 2, 3]])
    before = llama(ids).logits
    modules = list(llama.named_modules())
    llm = LLM(llama, lora_adapters=paths)
    llm.generate([1, 2, 3], PARAMS, lora="a")
    torch.testing.assert_close(llama(ids).logits, before, rtol=0, atol=0)
    assert list(llama.named_modules()) == modules
    assert all(parameter.requires_grad for parameter in llama.parameters())


def test_half_precision_is_served(llama, paths, make_prompt) -> None:
    llm = LLM(llama.to(torch.bfloat16), lora_adapters=paths, chunk_size=16)
    outputs = llm.generate([make_prompt(20)] * 3, PARAMS, lora=NAMES)
    assert [len(tokens) for tokens in _tokens(outputs)] == [MAX_TOKENS] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [("c", "lora is 'c'; allowed is 'a', 'b'"), (1, "lora is 1; allowed is 'a', 'b'")],
)
def test_an_unknown_adapter_is_refused(llama, paths, name, message) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        LLM(llama, lora_adapters=paths).generate([1], PARAMS, lora=name)


def test_an_adapter_without_any_loaded_is_refused(llama) -> None:
    with pytest.raises(InvalidConfigError, match="LLM got no lora_adapters"):
        LLM(llama).generate([1], PARAMS, lora="a")


@pytest.mark.parametrize("given", ["x", {"": "x"}, {"a": 1}, {1: "x"}])
def test_adapters_of_a_wrong_type_are_refused(llama, given) -> None:
    with pytest.raises(InvalidConfigError, match="lora_adapters"):
        LLM(llama, lora_adapters=given)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True, "target_modules": ["q_proj"]}, "by a variant of LoRA"),
        ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, "it replaces lm_head"),
        ({"target_modules": ["lm_head"]}, "it changes lm_head"),
        ({"target_modules": ["embed_tokens"]}, "the embedding model.embed_tokens"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "it adds a bias"),
        ({"target_modules": ["q_proj"], "bias": "all"}, "it replaces the model's biases"),
    ],
)
def test_what_cannot_be_served_is_refused(llama, tmp_path, config, reason) -> None:
    _save(tmp_path, 0, **config)
    before = list(llama.named_modules())
    with pytest.raises(InvalidConfigError, match=f"LoRA adapter 'x' cannot be served: .*{reason}"):
        LLM(llama, lora_adapters={"x": tmp_path})
    assert list(llama.named_modules()) == before


def test_an_adapter_of_another_model_is_refused(paths, build_model) -> None:
    with pytest.raises(InvalidConfigError, match="'a' cannot be served: its weights do not fit"):
        LLM(build_model(CONFIGS["qwen3"]()), lora_adapters={"a": paths["a"]})


def test_a_folder_without_an_adapter_is_refused(llama, tmp_path) -> None:
    with pytest.raises(InvalidConfigError, match=r"'a' cannot be served: .*adapter_config.json"):
        LLM(llama, lora_adapters={"a": tmp_path})


def test_without_the_library_the_extra_is_named(llama, paths, monkeypatch) -> None:
    monkeypatch.setattr(lora, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'chunkcache\[lora\]'"):
        LLM(llama, lora_adapters=paths)


TEXTS = st.text(alphabet="\0 1alorabse", max_size=12)


@hypothesis.given(
    st.lists(st.tuples(TEXTS, st.none() | TEXTS), min_size=2, max_size=2, unique=True)
)
def test_no_two_namespaces_are_the_same(pairs) -> None:
    one, other = itertools.starmap(lora.namespace, pairs)
    assert one != other


def test_the_bare_models_namespace_is_the_salt() -> None:
    assert lora.namespace("tenant", None) == "tenant"
