"""Greedy text equals transformers' own, for every kind of model and every use of the cache."""

import pytest

from chunkcache.engine import LLM, SamplingParams

MAX_TOKENS = 24
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)


@pytest.mark.parametrize("sharing", [True, False])
def test_prompts_with_a_common_beginning(
    tiny_model, make_prompt, expect_generated, sharing
) -> None:
    prefix = make_prompt(70)
    prompts = [make_prompt(5 + 7 * i, seed=i + 1, prefix=prefix) for i in range(4)]
    llm = LLM(tiny_model, chunk_size=16, enable_prefix_sharing=sharing)
    for prompt, output in zip(prompts, llm.generate(prompts, PARAMS), strict=True):
        expect_generated(tiny_model, prompt, output.outputs[0].token_ids, MAX_TOKENS)


def test_a_prompt_found_in_the_cache(tiny_model, make_prompt, expect_generated) -> None:
    prompt = make_prompt(64)
    llm = LLM(tiny_model, chunk_size=16)
    llm.generate(prompt, PARAMS)
    output = llm.generate(prompt, PARAMS)[0]
    assert output.cached_tokens == 64
    expect_generated(tiny_model, prompt, output.outputs[0].token_ids, MAX_TOKENS)


def test_a_prompt_computed_in_pieces(tiny_model, make_prompt, expect_generated) -> None:
    prompt = make_prompt(100)
    llm = LLM(tiny_model, chunk_size=16, max_num_batched_tokens=13)
    output = llm.generate(prompt, PARAMS)[0]
    expect_generated(tiny_model, prompt, output.outputs[0].token_ids, MAX_TOKENS)


def test_a_prompt_of_one_token(tiny_model, expect_generated) -> None:
    output = LLM(tiny_model, chunk_size=16).generate([7], PARAMS)[0]
    expect_generated(tiny_model, [7], output.outputs[0].token_ids, MAX_TOKENS)
