"""The parts of models built as Llama is: found where they compute the same, and only there."""

import pytest
import torch
import transformers

from chunkcache.engine.decode_stack import find_stack
from chunkcache_testing.tiny_models import CONFIGS, make_model

NUM_POSITIONS = 200


def sizes() -> dict[str, int]:
    return {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_models_built_as_llama_are_found(name) -> None:
    model = make_model(CONFIGS[name]())
    stack = find_stack(model, NUM_POSITIONS)
    assert stack is not None
    assert len(stack.layers) == model.config.num_hidden_layers
    assert stack.layers[0].gate_up[0] is model.model.layers[0].mlp.gate_proj.weight
    assert stack.cosine.shape == (NUM_POSITIONS, stack.head_dim // 2)


def test_how_a_layer_attends_is_noted() -> None:
    stack = find_stack(make_model(CONFIGS["mistral"]()), NUM_POSITIONS)
    assert [layer.call.layer for layer in stack.layers] == [0, 1, 2]
    assert {layer.call.sliding_window for layer in stack.layers} == {20}


def test_biases_and_head_norms_are_kept() -> None:
    with_biases = find_stack(make_model(CONFIGS["qwen2"]()), NUM_POSITIONS)
    assert all(bias is not None for bias in with_biases.layers[0].biases)
    with_norms = find_stack(make_model(CONFIGS["qwen3"]()), NUM_POSITIONS)
    assert with_norms.layers[0].head_norms is not None


@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_other_forms_are_left_alone(name) -> None:
    assert find_stack(make_model(CONFIGS[name]()), NUM_POSITIONS) is None


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_layers", [1, 8])
@pytest.mark.parametrize("width", [64, 256])
def test_it_is_found_in_every_dtype(dtype, num_layers, width) -> None:
    shape = {**sizes(), "num_hidden_layers": num_layers, "hidden_size": width}
    model = make_model(transformers.LlamaConfig(**shape)).to(dtype)
    assert find_stack(model, NUM_POSITIONS) is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "factor",
    [
        {"residual_multiplier": 0.9},
        {"residual_multiplier": 0.95},
        {"logits_scaling": 1.04},
        {"embedding_multiplier": 1.02},
    ],
    ids=lambda factor: "_".join(f"{name}_{value}" for name, value in factor.items()),
)
def test_a_model_that_differs_by_a_factor_is_left_alone(dtype, factor) -> None:
    neutral = {"residual_multiplier": 1.0, "logits_scaling": 1.0, "embedding_multiplier": 1.0}
    shape = {**sizes(), "num_hidden_layers": 8}
    config = transformers.GraniteConfig(**shape, **{**neutral, **factor})
    assert find_stack(make_model(config).to(dtype), NUM_POSITIONS) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ["gelu", "relu", "gelu_pytorch_tanh"])
def test_another_gate_is_left_alone(dtype, function) -> None:
    config = transformers.LlamaConfig(**sizes(), hidden_act=function)
    assert find_stack(make_model(config).to(dtype), NUM_POSITIONS) is None


def test_layers_of_other_sizes_are_left_alone(llama) -> None:
    other = transformers.LlamaConfig(**{**sizes(), "intermediate_size": 128})
    other.hidden_size = llama.config.hidden_size
    llama.model.layers[1].mlp = type(llama.model.layers[1].mlp)(other)
    assert find_stack(llama, NUM_POSITIONS) is None


@pytest.mark.parametrize(
    ("scaling", "is_found"),
    [
        ({"rope_type": "linear", "factor": 4.0}, True),
        ({"rope_type": "dynamic", "factor": 4.0}, False),
    ],
)
def test_only_fixed_angles_are_tabulated(scaling, is_found) -> None:
    config = transformers.LlamaConfig(**sizes(), rope_parameters={"rope_theta": 10000.0, **scaling})
    assert (find_stack(make_model(config), NUM_POSITIONS) is not None) == is_found


def test_a_module_with_a_hook_is_left_alone(llama) -> None:
    llama.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert find_stack(llama, NUM_POSITIONS) is None


def test_a_linear_layer_of_another_kind_is_left_alone(llama) -> None:
    class Scaled(torch.nn.Linear):
        pass

    llama.model.layers[0].mlp.down_proj.__class__ = Scaled
    assert find_stack(llama, NUM_POSITIONS) is None


def test_the_model_is_as_it_was(llama) -> None:
    ids = torch.arange(9)[None]
    before = llama(input_ids=ids).logits
    find_stack(llama, NUM_POSITIONS)
    assert llama.config._attn_implementation == "eager"
    assert torch.equal(llama(input_ids=ids).logits, before)
