"""Requests with every kind of parameter in one batch: each gets what it gets alone."""

import random
import re
from typing import Any

import pytest

from chunkcache.engine import LLM, SamplingParams

REGEX = "[a-e]{2,9}(x|yz)+"


def _params(rng: random.Random) -> SamplingParams:
    given: dict[str, Any] = {
        "max_tokens": rng.randint(1, 30),
        "seed": rng.randint(0, 99),
        "temperature": rng.choice([0, 0.7, 1.3]),
        "n": rng.choice([1, 1, 3]),
        "logprobs": rng.choice([None, 0, 3]),
        "prompt_logprobs": rng.choice([None, 0, 2]),
    }
    if rng.random() < 0.4:
        given["presence_penalty"] = rng.uniform(-1, 2)
        given["frequency_penalty"] = rng.uniform(-1, 1)
        given["repetition_penalty"] = rng.uniform(0.8, 1.5)
    if rng.random() < 0.4:
        given |= {"min_p": rng.uniform(0, 0.2), "top_k": rng.choice([0, 5, 50]), "top_p": 0.9}
    if rng.random() < 0.4:
        given["logit_bias"] = {rng.randint(0, 299): rng.uniform(-5, 5) for _ in range(3)}
        given["min_tokens"] = rng.randint(0, given["max_tokens"])
    if rng.random() < 0.4:
        given["guided_regex"] = REGEX
    elif rng.random() < 0.4:
        given |= {"stop": ["a", "xy"], "include_stop_str_in_output": rng.random() < 0.5}
    return SamplingParams(**given)


def _samples(request) -> list[tuple]:
    return [
        (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason)
        for sample in request.outputs
    ]


@pytest.mark.parametrize("seed", range(3))
def test_each_request_gets_what_it_gets_alone(llama, tokenizer, seed) -> None:
    llama.generation_config.eos_token_id = 256
    rng = random.Random(seed)
    common = [rng.randint(0, 255) for _ in range(60)]
    prompts = [
        common[: rng.randint(1, 60)] + [rng.randint(0, 255) for _ in range(rng.randint(0, 8))]
        for _ in range(6)
    ]
    params = [_params(rng) for _ in prompts]
    llm = LLM(
        llama,
        tokenizer,
        chunk_size=16,
        capacity=rng.choice([8, 14, 200]),
        max_num_seqs=rng.choice([2, 5, 64]),
        max_num_batched_tokens=rng.choice([7, 33, 512]),
        enable_prefix_sharing=rng.random() < 0.8,
    )
    outputs = llm.generate(prompts, params)
    llm.check_accounts()
    alone = LLM(llama, tokenizer, chunk_size=16, enable_overlap=False)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        expected = alone.generate(prompt, own)[0]
        assert _samples(output) == _samples(expected)
        for sample in output.outputs:
            assert sample.logprobs is None or len(sample.logprobs) == len(sample.token_ids)
            if own.guided_regex and sample.finish_reason == "stop":
                assert re.fullmatch(REGEX, sample.text)
        assert (output.prompt_logprobs is None) == (own.prompt_logprobs is None)
        for entry, other in zip(
            (output.prompt_logprobs or [])[1:], (expected.prompt_logprobs or [])[1:], strict=True
        ):
            token = next(iter(entry))
            assert entry[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)
