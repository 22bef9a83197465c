"""The engine on a CUDA device: its logits are transformers' own, recorded or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from chunkcache import InvalidConfigError
from chunkcache.engine import LLM, SamplingParams
from chunkcache.engine.attention import implementation
from chunkcache.engine.picker import TokenPicker
from chunkcache_testing.devices import NEEDS_CUDA, NEEDS_FP8
from chunkcache_testing.logits import serve_all
from chunkcache_testing.tiny_models import CONFIGS, make_model

pytestmark = NEEDS_CUDA

MAX_TOKENS = 40
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
#: Largest error of a row's logits over their largest, against transformers' own in float16. The
#: random weights multiply each rounding; bfloat16's are eight times as large.
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 4e-2}


@pytest.fixture
def llama64() -> Any:
    """A small Llama with heads as wide as the kernels want them."""
    return make_wide("llama", torch.float16)


def make_wide(name: str, dtype: torch.dtype) -> Any:
    """Return a small model with heads as wide as the kernels want them."""
    config = CONFIGS[name]()
    config.head_dim = 64
    return make_model(config).to("cuda", dtype)


@pytest.fixture
def watched(monkeypatch) -> dict[int, list[torch.Tensor]]:
    """The logits that each sample's tokens were picked from, by the identity of its state."""
    seen: dict[int, list[torch.Tensor]] = {}
    pick = TokenPicker.pick

    def watching(self, logits, picks):
        for each in picks:
            seen.setdefault(id(each.state), []).append(logits[each.row].float().cpu())
        return pick(self, logits, picks)

    monkeypatch.setattr(TokenPicker, "pick", watching)
    return seen


#: Where a rounding of the model's own leads to another neighbour in fp8, more is multiplied.
TOLERANCE_FP8 = 6e-2


def check_logits(
    model: Any,
    request: Any,
    seen: dict[int, list[torch.Tensor]],
    tolerance: float | None = None,
) -> None:
    """Compare the logits of each step with one forward pass over the whole text."""
    prompt = list(request.prompt_token_ids)
    for sequence in request.sequences:
        tokens = list(sequence.output.token_ids)
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device="cuda")
        with torch.inference_mode():
            expected = model(input_ids=ids).logits[0, len(prompt) - 1 :].float().cpu()
        found = torch.stack(seen[id(sequence.state)][: len(tokens)])
        error = (found - expected).abs().amax(1) / expected.abs().amax(1)
        assert float(error.max()) <= (TOLERANCE[model.dtype] if tolerance is None else tolerance)


def serve(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    """Serve prompts that come in two waves, the second while the first decodes."""
    requests = [llm.request(prompt, params) for prompt in prompts]
    serve_all(llm, requests)
    return requests


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_logits_are_those_of_transformers(
    llama64, make_prompt, watched, sharing, graphs, overlap
) -> None:
    prefix = make_prompt(70)
    prompts = [make_prompt(3 + 9 * i, seed=i + 1, prefix=prefix) for i in range(6)]
    llm = LLM(
        llama64,
        chunk_size=16,
        capacity=200,
        max_num_seqs=8,
        enable_prefix_sharing=sharing,
        enable_cuda_graphs=graphs,
        enable_overlap=overlap,
    )
    for request in serve(llm, prompts, PARAMS):
        check_logits(llama64, request, watched)


def test_samples_fork_from_one_prompt(llama64, make_prompt, watched) -> None:
    llm = LLM(llama64, chunk_size=16, capacity=200, max_num_seqs=8)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, n=5, temperature=1.0, seed=3)
    for request in serve(llm, [make_prompt(50), make_prompt(20, seed=4)], params):
        assert len({tuple(s.output.token_ids) for s in request.sequences}) > 1
        check_logits(llama64, request, watched)


def test_a_small_pool_preempts_and_resumes(llama64, make_prompt, watched) -> None:
    llm = LLM(llama64, chunk_size=16, capacity=16, max_num_seqs=8)
    prompts = [make_prompt(30, seed=i) for i in range(6)]
    for request in serve(llm, prompts, PARAMS):
        assert len(request.sequences[0].output.token_ids) == MAX_TOKENS
    assert llm.stats.num_preemptions > 0


def test_bfloat16(make_prompt, watched) -> None:
    model = make_wide("llama", torch.bfloat16)
    llm = LLM(model, chunk_size=16, capacity=100, max_num_seqs=4)
    for request in serve(llm, [make_prompt(60), make_prompt(33, seed=1)], PARAMS):
        check_logits(model, request, watched)


@pytest.fixture
def over_fp8() -> str:
    """The name of an attention of transformers to which K and V come as fp8 keeps them."""

    def attend(module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        key, value = (
            (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
            for x, scale in ((key, 0.5), (value, 0.125))
        )
        as_it_is = transformers.AttentionInterface()["sdpa"]
        parts = (x.to(query.dtype) for x in (key, value))
        return as_it_is(module, query, *parts, *rest, **options)

    transformers.AttentionInterface.register("over_fp8", attend)
    transformers.AttentionMaskInterface.register(
        "over_fp8", transformers.AttentionMaskInterface()["sdpa"]
    )
    return "over_fp8"


@NEEDS_FP8
@pytest.mark.parametrize("graphs", [True, False])
def test_kv_cache_in_fp8(llama64, make_prompt, watched, over_fp8, graphs) -> None:
    prefix = make_prompt(70)
    prompts = [make_prompt(3 + 9 * i, seed=i + 1, prefix=prefix) for i in range(4)]
    options = {"chunk_size": 16, "max_num_seqs": 8, "enable_cuda_graphs": graphs}
    fp8 = {"kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 0.125}
    llm = LLM(llama64, capacity_bytes=3 * 2**18, **options, **fp8)
    assert llm.capacity == 2 * LLM(llama64, capacity_bytes=3 * 2**18, **options).capacity
    requests = serve(llm, prompts, PARAMS)
    with implementation(llama64, over_fp8):
        for request in requests:
            check_logits(llama64, request, watched, TOLERANCE_FP8)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_windows_and_caps(make_prompt, watched, name) -> None:
    model = make_wide(name, torch.float16)
    llm = LLM(model, chunk_size=16, capacity=100, max_num_seqs=4)
    for request in serve(llm, [make_prompt(60), make_prompt(33, seed=1)], PARAMS):
        check_logits(model, request, watched)


def test_a_model_folder_is_loaded_onto_the_device(llama64, tmp_path, make_prompt) -> None:
    llama64.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), device="cuda", chunk_size=16, capacity=32)
    assert llm.model.device.type == "cuda"
    assert llm.spec.dtype == "bfloat16"
    assert llm.cache.device == "cuda:0"
    assert len(llm.generate(make_prompt(9), PARAMS)[0].outputs[0].token_ids) == MAX_TOKENS


def test_wrong_devices_and_dtypes_are_named(build_model: Callable[[Any], Any]) -> None:
    on_host = build_model(CONFIGS["llama"]())
    with pytest.raises(InvalidConfigError, match="loaded model is on cpu"):
        LLM(on_host, device="cuda")
    with pytest.raises(InvalidConfigError, match="dtype is float32; allowed on a CUDA device"):
        LLM(on_host.to("cuda"))
    with pytest.raises(InvalidConfigError, match="head_dim"):
        LLM(build_model(CONFIGS["llama"]()).to("cuda", torch.bfloat16))
