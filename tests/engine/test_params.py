"""What SamplingParams and EngineConfig allow."""

import math

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
