"""Models that cannot be served are refused with the reason, not run wrongly."""

from typing import Any

import pytest
import torch
import transformers

from chunkcache import InvalidConfigError
from chunkcache.engine import LLM, llm, loader

_SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _config(name: str, **changes: Any) -> Any:
    return getattr(transformers, name)(**{**_SIZES, **changes})


def _deepseek() -> Any:
    return _config(
        "DeepseekV3Config",
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )


def _gemma3n() -> Any:
    return _config(
        "Gemma3nTextConfig",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=100,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        intermediate_size=[48] * 4,
        activation_sparsity_pattern=[0.0] * 4,
    )


def _lfm2() -> Any:
    return _config("Lfm2Config", layer_types=["conv", "full_attention"])


REFUSED = {
    "multi-head latent attention": _deepseek,
    "sinks": lambda: _config("GptOssConfig", num_local_experts=4, num_experts_per_tok=2),
    "ALiBi": lambda: transformers.BloomConfig(vocab_size=100, hidden_size=32, n_layer=2, n_head=4),
    "share K/V": _gemma3n,
    "of the kind conv": _lfm2,
    "recurrent|linear_attention": lambda: transformers.MambaConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2
    ),
    "of the kind chunked_attention": lambda: _config(
        "Llama4TextConfig", num_local_experts=2, intermediate_size_mlp=48, pad_token_id=0
    ),
    "not causal": lambda: transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    ),
    "AttentionInterface": lambda: transformers.XGLMConfig(
        vocab_size=100, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4
    ),
    "head_dim of 10": lambda: _config("LlamaConfig", head_dim=10),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reason", REFUSED)
def test_a_feature_that_is_not_served_is_named(build_model, reason) -> None:
    model = build_model(REFUSED[reason]())
    with pytest.raises(InvalidConfigError, match=reason):
        LLM(model, chunk_size=16)


def test_an_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
    )
    with pytest.raises(InvalidConfigError, match="encoder-decoder"):
        LLM(transformers.T5ForConditionalGeneration(config))


def test_attention_of_another_kind_is_found_by_the_probe(llama, monkeypatch) -> None:
    from transformers.models.llama import modeling_llama

    def squared(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        groups = module.num_key_value_groups
        key = modeling_llama.repeat_kv(key, groups)
        scores = query @ key.transpose(2, 3) * scaling
        weights = (scores.square() + attention_mask).softmax(dim=-1)
        return (weights @ modeling_llama.repeat_kv(value, groups)).transpose(1, 2), weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", squared)
    with pytest.raises(InvalidConfigError, match="eager attention"):
        LLM(llama)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="PreTrainedModel"):
        LLM(torch.nn.Linear(2, 2))


def test_a_dtype_other_than_the_loaded_models_is_refused(llama) -> None:
    with pytest.raises(InvalidConfigError, match="dtype"):
        LLM(llama, dtype="bfloat16")


def test_the_advice_for_another_dtype_can_be_followed(llama) -> None:
    with pytest.raises(InvalidConfigError, match=r"with model\.to\(torch\.bfloat16\) first$"):
        LLM(llama, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["int8", "float64", torch.float64, "float8_e4m3fn", "x", 3])
def test_a_dtype_that_no_model_is_served_in_is_refused(llama, dtype) -> None:
    with pytest.raises(InvalidConfigError, match=r"allowed is float32, bfloat16, float16 or auto"):
        LLM(llama, dtype=dtype)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile_model": True}, "compile_model is True; allowed on the CPU is False"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'; allowed on the CPU is 'auto'"),
        (
            {"kv_cache_dtype": torch.float8_e4m3fn},
            "kv_cache_dtype is float8_e4m3fn; allowed on the CPU is 'auto'",
        ),
    ],
)
@pytest.mark.parametrize("loaded", [True, False])
def test_what_is_for_cuda_is_refused_before_a_model_is_loaded(
    llama, monkeypatch, tmp_path, options, message, loaded
) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(loader, "load_model", fail)
    monkeypatch.setattr(llm, "probe", fail)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidConfigError, match=f"^{message}$"):
        LLM(llama if loaded else tmp_path, **options)


def test_an_unknown_option_is_refused(llama) -> None:
    with pytest.raises(InvalidConfigError, match=r"^chunk_sizes is 16, .*, chunk_size,"):
        LLM(llama, chunk_sizes=16)


@pytest.mark.parametrize("tokenizer", [3, "gpt2", False])
def test_what_is_no_tokenizer_is_refused(llama, tokenizer) -> None:
    with pytest.raises(InvalidConfigError, match=r"^tokenizer is a"):
        LLM(llama, tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["", " ", "~nosuchuser/model"])
def test_a_name_that_stands_for_no_folder_is_refused(name) -> None:
    with pytest.raises(InvalidConfigError, match=r"^model is"):
        LLM(name)


@pytest.mark.parametrize("params", [3, "x", {"temperature": 1}])
def test_what_are_no_sampling_params_is_refused(llama, params) -> None:
    with pytest.raises(InvalidConfigError, match=r"^sampling_params is a"):
        LLM(llama).generate([1, 2], params)


def test_a_length_beyond_the_models_is_refused(llama) -> None:
    with pytest.raises(InvalidConfigError, match="max_model_len"):
        LLM(llama, max_model_len=513)


def test_rotary_scaling_by_length_keeps_to_the_length_it_is_right_for(build_model) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    rope["original_max_position_embeddings"] = 128
    model = build_model(_config("LlamaConfig", rope_parameters=rope, max_position_embeddings=512))
    assert LLM(model).max_model_len == 128


def test_fp8_on_the_cpu_is_refused_by_name(llama) -> None:
    with pytest.raises(
        InvalidConfigError, match="kv_cache_dtype is 'fp8'; allowed on the CPU is 'auto'"
    ):
        LLM(llama, kv_cache_dtype="fp8")


def test_fp8_is_refused_on_a_device_that_is_too_old_before_the_model_is_loaded(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(llm, "resolve_device", torch.device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(loader, "load_model", pytest.fail)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        InvalidConfigError,
        match=r"^kv_cache_dtype is 'fp8'; allowed .* 8.0 is 'auto', fp8 needs 8.9",
    ):
        LLM(tmp_path, device="cuda:0", kv_cache_dtype="fp8")
