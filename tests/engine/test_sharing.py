"""What is computed once, what is kept apart, and what happens when the pool is full."""

import pytest

from chunkcache import InvalidConfigError, OutOfChunksError
from chunkcache.engine import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=12)


def _tokens(outputs) -> list[list[int]]:
    return [output.token_ids for request in outputs for output in request.outputs]


def test_equal_prompts_that_come_together_are_computed_once(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16)
    llm.generate([make_prompt(70)] * 10, GREEDY)
    # The last token of each is needed for its logits.
    assert llm.stats.num_prompt_tokens_computed == 70 + 9


def test_a_common_beginning_is_computed_once(llama, make_prompt) -> None:
    prefix = make_prompt(75)
    prompts = [[*prefix, 10 + i, *make_prompt(7, seed=i)] for i in range(6)]
    llm = LLM(llama, chunk_size=16)
    llm.generate(prompts, GREEDY)
    assert llm.stats.num_prompt_tokens_computed == 75 + 6 * 8


def test_a_common_beginning_is_computed_once_in_pieces(llama, make_prompt) -> None:
    prefix = make_prompt(75)
    prompts = [[*prefix, 10 + i, *make_prompt(7, seed=i)] for i in range(6)]
    llm = LLM(llama, chunk_size=16, max_num_seqs=8, max_num_batched_tokens=20)
    llm.generate(prompts, GREEDY)
    assert llm.stats.num_prompt_tokens_computed == 75 + 6 * 8


def test_without_sharing_everything_is_computed(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16, enable_prefix_sharing=False)
    outputs = llm.generate([make_prompt(70)] * 3, GREEDY)
    assert llm.stats.num_prompt_tokens_computed == 3 * 70
    assert [output.cached_tokens for output in outputs] == [0, 0, 0]


def test_an_earlier_prompt_is_found_again(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16)
    llm.generate(make_prompt(70), GREEDY)
    output = llm.generate([*make_prompt(64), 7, 8, 9], GREEDY)[0]
    assert (output.cached_tokens, output.num_computed_prompt_tokens) == (64, 3)


def test_another_salt_finds_nothing(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16)
    llm.generate(make_prompt(70), GREEDY, cache_salt="a")
    assert llm.generate(make_prompt(70), GREEDY, cache_salt="b")[0].cached_tokens == 0


def test_samples_of_a_prompt_share_it(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=5)
    output = llm.generate(make_prompt(70), params)[0]
    assert output.num_computed_prompt_tokens == 70
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 5


@pytest.mark.parametrize("options", [{"max_num_seqs": 2}, {"enable_prefix_sharing": False}])
def test_samples_are_the_same_however_they_begin(llama, make_prompt, options) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=5)
    forked = LLM(llama, chunk_size=16).generate(make_prompt(70), params)
    others = LLM(llama, chunk_size=16, **options).generate(make_prompt(70), params)
    assert _tokens(others) == _tokens(forked)


def test_draws_do_not_depend_on_the_batch(llama, make_prompt) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, top_k=50, top_p=0.9, seed=11)
    others = SamplingParams(max_tokens=9, temperature=1.5)
    alone = LLM(llama).generate(make_prompt(9), params)
    together = LLM(llama).generate(
        [make_prompt(30, seed=5), make_prompt(9), make_prompt(3, seed=6)], [others, params, others]
    )
    assert together[1].outputs[0].token_ids == alone[0].outputs[0].token_ids


def test_requests_without_a_seed_differ(llama) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0)
    tokens = _tokens(LLM(llama).generate([[1, 2], [1, 2]], params))
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_full_pool_preempts_and_resumes_with_equal_text(
    llama, make_prompt, sharing, temperature
) -> None:
    prompts = [make_prompt(30, seed=i) for i in range(5)]
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=2)
    options = {"chunk_size": 16, "enable_prefix_sharing": sharing}
    roomy = LLM(llama, **options)
    tight = LLM(llama, capacity=12, **options)
    assert _tokens(tight.generate(prompts, params)) == _tokens(roomy.generate(prompts, params))
    assert tight.stats.num_preemptions > 0


def test_a_full_pool_leaves_nothing_behind(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16, capacity=12)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=2, n=3)
    llm.generate([make_prompt(30, seed=i) for i in range(4)], params)
    stats = llm.cache.stats()
    assert stats.num_free + stats.num_evictable == stats.capacity


def test_more_prompts_than_places_are_all_served(llama, make_prompt) -> None:
    prompts = [make_prompt(10, seed=i) for i in range(7)]
    few = LLM(llama, max_num_seqs=2).generate(prompts, GREEDY)
    assert _tokens(few) == _tokens(LLM(llama).generate(prompts, GREEDY))


def test_more_sequences_than_the_token_budget_are_all_served(llama, make_prompt) -> None:
    prompts = [make_prompt(10, seed=i) for i in range(7)]
    slow = LLM(llama, max_num_batched_tokens=3).generate(prompts, GREEDY)
    assert _tokens(slow) == _tokens(LLM(llama).generate(prompts, GREEDY))


def test_a_pinned_pool_fails_the_request_alone(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16, capacity=6)
    kept = make_prompt(64)
    llm.generate(kept, SamplingParams(max_tokens=1))
    pin = llm.cache.pin(kept)
    with pytest.raises(OutOfChunksError):
        llm.generate(make_prompt(60, seed=1), SamplingParams(max_tokens=1))
    llm.cache.unpin(pin)
    assert len(llm.generate(make_prompt(60, seed=1), GREEDY)[0].outputs[0].token_ids) == 12


def test_each_prompt_may_have_its_own_salt(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16)
    outputs = llm.generate([make_prompt(70)] * 3, GREEDY, cache_salt=["a", "b", "a"])
    assert [output.num_computed_prompt_tokens for output in outputs] == [70, 70, 1]


def test_salts_for_another_number_of_prompts_are_refused(llama) -> None:
    with pytest.raises(InvalidConfigError, match="cache_salt has 2 entries for 3 prompts"):
        LLM(llama).generate([[1], [2], [3]], GREEDY, cache_salt=["a", "b"])


@pytest.mark.parametrize("priority", [1.5, True, None, ["x"], "high"])
def test_a_priority_is_an_int(llama, priority) -> None:
    with pytest.raises(InvalidConfigError, match="priority"):
        LLM(llama).generate([[1]], GREEDY, priority=priority)
