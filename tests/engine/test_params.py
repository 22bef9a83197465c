"""What SamplingParams and EngineConfig allow."""

import math

import numpy as np
import pytest
import torch

from chunkcache import InvalidConfigError
from chunkcache.engine import EngineConfig, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: None}),
        ("min_tokens", -1),
        ("min_tokens", 129),
        ("logprobs", -2),
        ("logprobs", True),
        ("prompt_logprobs", 1.0),
        ("include_stop_str_in_output", 1),
        ("seed", -1),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("n", 0),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**32]),
        ("stop_token_ids", b"ab"),
        ("stop", {"END": 1}),
        ("ignore_eos", "x"),
        ("ignore_eos", None),
        ("skip_special_tokens", 1),
    ],
)
def test_sampling_params_refuses(name, value) -> None:
    with pytest.raises(InvalidConfigError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_size", 24),
        ("chunk_size", 0),
        ("chunk_size", 256),
        ("chunk_size", 16.0),
        ("capacity", 0),
        ("capacity_bytes", -5),
        ("max_model_len", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("num_threads", 0),
        ("seed", -1),
        ("seed", True),
        ("enable_prefix_sharing", "x"),
    ],
)
def test_engine_config_refuses(name, value) -> None:
    with pytest.raises(InvalidConfigError, match=name):
        EngineConfig(**{name: value})


def test_engine_config_refuses_two_capacities() -> None:
    with pytest.raises(InvalidConfigError, match="capacity_bytes"):
        EngineConfig(capacity=10, capacity_bytes=1000)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop_strings == ("END",)


def test_no_stop_may_be_given_as_none() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None)
    assert (params.stop_strings, params.stop_ids) == ((), ())


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_a_number_for_what_stops_is_refused(name) -> None:
    with pytest.raises(InvalidConfigError, match=f"{name} is 3; allowed is None, or"):
        SamplingParams(**{name: 3})


def test_a_bias_may_be_given_as_json_has_it() -> None:
    assert SamplingParams(logit_bias={"12": 1}).logit_bias == {12: 1.0}


def test_params_with_a_bias_are_hashable() -> None:
    assert hash(SamplingParams(logit_bias={1: 2})) == hash(SamplingParams(logit_bias={1: 2}))


@pytest.mark.parametrize("dtype", ["int8", "fp8_e5m2", "float16", None, 8, ["auto"]])
def test_kv_cache_dtypes_are_few(dtype) -> None:
    with pytest.raises(
        InvalidConfigError, match=r"^kv_cache_dtype is .* allowed is 'auto' or 'fp8'$"
    ):
        EngineConfig(kv_cache_dtype=dtype)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "float8_e4m3fn", torch.float8_e4m3fn])
def test_fp8_has_several_names(dtype) -> None:
    assert EngineConfig(kv_cache_dtype=dtype, k_scale=0.5).kv_dtype("bfloat16") == "float8_e4m3fn"
    assert EngineConfig().kv_dtype("bfloat16") == "bfloat16"


def test_scales_are_for_fp8_alone() -> None:
    with pytest.raises(InvalidConfigError, match=r"v_scale is 0\.5; allowed is None unless"):
        EngineConfig(v_scale=0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"guided_regex": "a\ud800"},
        {"guided_choice": ["a", "b\ud800"]},
        {"guided_json": '{"const": "\ud800"}'},
    ],
)
def test_half_characters_in_a_grammar_are_refused(options) -> None:
    (name,) = options
    with pytest.raises(InvalidConfigError, match=f"{name} has .*allowed is text without lone"):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 16385),
        ("n", 10**9),
        ("top_k", 2**31),
        ("temperature", 10**400),
        ("repetition_penalty", 10**400),
        ("logit_bias", {"1" * 5000: 1.0}),
    ],
)
def test_numbers_beyond_all_use_are_refused(name, value) -> None:
    with pytest.raises(InvalidConfigError, match=rf"^{name} is .*; allowed is "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["n", "top_k", "min_tokens", "seed", "temperature", "top_p"])
def test_numbers_too_long_to_be_written_are_refused(name) -> None:
    with pytest.raises(
        InvalidConfigError, match=rf"^{name} is an object of type int .*; allowed is "
    ):
        SamplingParams(**{name: 10**5000})


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs", "max_tokens"])
def test_a_number_that_something_else_bounds_may_be_any(name) -> None:
    assert getattr(SamplingParams(**{name: 10**9}), name) == 10**9


def test_as_many_samples_as_vllm_takes_are_allowed() -> None:
    assert SamplingParams(n=16384).n == 16384


@pytest.mark.parametrize("name", ["chunk_size", "seed", "enable_overlap", "memory_fraction"])
def test_engine_config_refuses_numbers_beyond_all_use(name) -> None:
    with pytest.raises(InvalidConfigError, match=rf"^{name} is .*; allowed is "):
        EngineConfig(**{name: 10**5000})


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize(
    "scale",
    [
        math.nan,
        math.inf,
        0,
        -1.0,
        1e300,
        10**400,
        1e-60,
        "x",
        True,
        [1],
        [[1.0, 0.0]],
        [[1.0], [1.0, 2.0]],
        [["1"]],
        {"a": 1},
        np.ones((2, 2)),
        np.full((2, 2), np.nan, np.float32),
        torch.ones(2),
    ],
)
def test_scales_are_refused_before_there_is_a_model(name, scale) -> None:
    with pytest.raises(InvalidConfigError, match=rf"^{name}: got .*, allowed"):
        EngineConfig(kv_cache_dtype="fp8", **{name: scale})


@pytest.mark.parametrize(
    "scale", [1, 0.5, np.float32(0.5), [[1, 2]], np.ones((2, 3), np.float32), torch.ones(2, 3)]
)
def test_scales_are_a_number_or_one_for_each_head(scale) -> None:
    assert EngineConfig(kv_cache_dtype="fp8", k_scale=scale).k_scale is scale


@pytest.mark.parametrize("dtype", [torch.float16, np.float16, np.dtype("float16")])
def test_a_kv_cache_dtype_is_named(dtype) -> None:
    with pytest.raises(InvalidConfigError, match=r"^kv_cache_dtype is float16; allowed"):
        EngineConfig(kv_cache_dtype=dtype)


def test_compiling_without_recording_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="compile_model is True; allowed with enable_cuda"):
        EngineConfig(compile_model=True, enable_cuda_graphs=False)
