"""RMS norms by torch's kernel: only where it computes the same."""

import pytest
import torch

from chunkcache.engine.fused_norms import fused_norms
from chunkcache_testing.tiny_models import CONFIGS, make_model


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_logits_stay_and_the_model_is_as_it_was(name) -> None:
    model = make_model(CONFIGS[name]())
    norms = [m for m in model.modules() if "RMSNorm" in type(m).__name__]
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
        with fused_norms(model) as count:
            assert count == len(norms)
            found = model(input_ids=ids).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert not any("forward" in vars(module) for module in norms)


def test_a_norm_that_adds_one_to_its_weight_is_left_alone() -> None:
    with fused_norms(make_model(CONFIGS["gemma2"]())) as count:
        assert count == 0
