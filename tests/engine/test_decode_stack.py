"""The parts of models built as Llama is: found where they compute the same, and only there."""

import pytest
import torch
import transformers

from chunkcache.engine.decode_stack import find_stack
from tiny_models import CONFIGS, make_model

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


def test_a_model_that_differs_by_a_factor_is_left_alone() -> None:
    config = transformers.GraniteConfig(**sizes(), residual_multiplier=0.9)
    assert find_stack(make_model(config), NUM_POSITIONS) is None


def test_another_gate_is_left_alone() -> None:
    config = transformers.LlamaConfig(**sizes(), hidden_act="gelu")
    assert find_stack(make_model(config), NUM_POSITIONS) is None


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
