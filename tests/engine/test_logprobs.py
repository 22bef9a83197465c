"""Log-probabilities of generated and of prompt tokens, against a plain forward pass."""

import numpy as np
import pytest
import torch

from chunkcache import InvalidConfigError
from chunkcache.engine import LLM, SamplingParams
from chunkcache.engine.logprobs import logprobs_of

NUM_TOP = 4


def _expected(model, tokens: list[int]) -> np.ndarray:
    """Return the log-probabilities of each next token, from the model alone."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].double().log_softmax(dim=-1).numpy()


def _check(entries, tokens: list[int], expected: np.ndarray) -> None:
    assert len(entries) == len(tokens)
    for entry, token, values in zip(entries, tokens, expected, strict=True):
        order = np.argsort(-values, kind="stable").tolist()
        assert next(iter(entry)) == token
        assert set(entry) == {token, *order[:NUM_TOP]}
        for other, logprob in entry.items():
            assert abs(logprob.logprob - values[other]) < 1e-4
            assert logprob.rank == order.index(other) + 1


def _check_request(model, request) -> None:
    prompt = request.prompt_token_ids
    for output in request.outputs:
        expected = _expected(model, [*prompt, *output.token_ids])
        _check(output.logprobs, output.token_ids, expected[len(prompt) - 1 : -1])
        total = sum(entry[token].logprob for entry, token in _pairs(output))
        assert output.cumulative_logprob == pytest.approx(total)
    assert request.prompt_logprobs[0] is None
    _check(request.prompt_logprobs[1:], prompt[1:], _expected(model, prompt)[:-1])


def _pairs(output):
    return zip(output.logprobs, output.token_ids, strict=True)


BOTH = {"logprobs": NUM_TOP, "prompt_logprobs": NUM_TOP}


@pytest.mark.parametrize("sharing", [True, False])
def test_they_are_those_of_a_plain_forward(llama, make_prompt, sharing) -> None:
    llm = LLM(llama, chunk_size=16, enable_prefix_sharing=sharing)
    params = SamplingParams(max_tokens=8, temperature=1.0, repetition_penalty=1.5, **BOTH)
    prompts = [make_prompt(20 + i, seed=i, prefix=make_prompt(40)) for i in range(3)]
    for request in llm.generate([*prompts, [7]], params):
        _check_request(llama, request)


@pytest.mark.parametrize("num_prompt", [64, 70])
def test_they_are_right_on_a_cached_prompt(llama, make_prompt, num_prompt) -> None:
    llm = LLM(llama, chunk_size=16)
    llm.generate(make_prompt(64), SamplingParams(max_tokens=4))
    prompt = make_prompt(64) + make_prompt(num_prompt - 64, seed=1)
    request = llm.generate(prompt, SamplingParams(max_tokens=4, **BOTH))[0]
    assert (request.cached_tokens, request.num_computed_prompt_tokens) == (64, num_prompt)
    _check_request(llama, request)


def test_rows_run_again_write_nothing_into_shared_chunks(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16)
    prompt = make_prompt(64)
    llm.generate(prompt, SamplingParams(max_tokens=1))
    held = llm.cache.insert(prompt)
    before = llm.cache.read_kv(1, held.seq, 0, 64)
    num_free = llm.cache.stats().num_free
    llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert llm.cache.stats().num_free == num_free
    for old, new in zip(before, llm.cache.read_kv(1, held.seq, 0, 64), strict=True):
        assert torch.equal(old, new)


def test_a_prompt_in_pieces_gives_them_all(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16, max_num_batched_tokens=13)
    params = SamplingParams(max_tokens=3, **BOTH)
    for request in llm.generate([make_prompt(50), make_prompt(31, seed=1)], params):
        _check_request(llama, request)


def test_all_samples_have_them(llama, make_prompt) -> None:
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=1, n=3, **BOTH)
    request = LLM(llama, chunk_size=16).generate(make_prompt(40), params)[0]
    _check_request(llama, request)


def test_they_survive_a_full_pool(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16, capacity=12)
    prompts = [make_prompt(30, seed=i) for i in range(5)]
    for request in llm.generate(prompts, SamplingParams(max_tokens=40, **BOTH)):
        _check_request(llama, request)
    assert llm.stats.num_preemptions > 0


def test_none_are_made_unasked(llama) -> None:
    request = LLM(llama).generate([1, 2], SamplingParams(max_tokens=2))[0]
    assert (request.prompt_logprobs, request.outputs[0].logprobs) == (None, None)


def test_zero_gives_the_chosen_token_alone(llama) -> None:
    params = SamplingParams(max_tokens=3, logprobs=0, prompt_logprobs=0)
    request = LLM(llama).generate([1, 2, 3], params)[0]
    assert [list(entry) for entry in request.prompt_logprobs[1:]] == [[2], [3]]
    output = request.outputs[0]
    assert [list(entry) for entry in output.logprobs] == [[token] for token in output.token_ids]


def test_minus_one_gives_the_whole_vocabulary(llama) -> None:
    request = LLM(llama).generate([1, 2], SamplingParams(max_tokens=1, logprobs=-1))[0]
    assert sorted(request.outputs[0].logprobs[0]) == list(range(300))


def test_more_than_the_vocabulary_is_refused(llama) -> None:
    with pytest.raises(InvalidConfigError, match="prompt_logprobs is 301; allowed is at most 300"):
        LLM(llama).generate([1], SamplingParams(prompt_logprobs=301))


def test_they_have_the_tokens_text(llama, tokenizer) -> None:
    request = LLM(llama, tokenizer).generate("ab", SamplingParams(max_tokens=1, **BOTH))[0]
    entry = request.prompt_logprobs[1]
    assert entry[request.prompt_token_ids[1]].decoded_token == "b"
    token = request.outputs[0].token_ids[0]
    assert request.outputs[0].logprobs[0][token].decoded_token == tokenizer.decode([token])


def test_a_stream_carries_them(llama) -> None:
    llm = LLM(llama)
    params = SamplingParams(max_tokens=4, logprobs=2)
    pieces = list(llm.generate([1, 2], params, stream=True))
    added = [entry for piece in pieces for entry in piece.logprobs]
    assert added == llm.generate([1, 2], params)[0].outputs[0].logprobs


def test_equal_logits_rank_by_id() -> None:
    (entry,) = logprobs_of(torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]]), [2], 2)
    assert [(token, value.rank) for token, value in entry.items()] == [(2, 2), (1, 1)]
