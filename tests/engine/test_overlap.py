"""Planning beside the computation changes no bit of what is computed."""

import pytest

from chunkcache.engine import LLM, SamplingParams


def _outputs(llama, make_prompt, overlap: bool, **options):
    llm = LLM(llama, chunk_size=16, enable_overlap=overlap, **options)
    prefix = make_prompt(40, seed=9)
    prompts = [make_prompt(11 * i + 3, seed=i, prefix=prefix) for i in range(6)]
    params = [
        SamplingParams(
            max_tokens=20 + 5 * i,
            temperature=i % 2,
            seed=i,
            logprobs=3,
            n=1 + i % 3,
            stop_token_ids=range(0, 300, 60),
        )
        for i in range(6)
    ]
    return llm, llm.generate(prompts, params)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 30},
        {"capacity": 18},
        {"enable_prefix_sharing": False},
        {"enable_chunked_prefill": False},
        {"max_num_seqs": 2},
    ],
)
def test_tokens_and_log_probabilities_are_equal_to_the_bit(llama, make_prompt, options) -> None:
    _, on = _outputs(llama, make_prompt, True, **options)
    _, off = _outputs(llama, make_prompt, False, **options)
    # Log-probabilities are compared too, as floats.
    assert [request.outputs for request in on] == [request.outputs for request in off]


def test_the_same_steps_are_run(llama, make_prompt) -> None:
    on, _ = _outputs(llama, make_prompt, True, capacity=18)
    off, _ = _outputs(llama, make_prompt, False, capacity=18)
    for count in ("num_steps", "num_preemptions", "num_prompt_tokens_computed"):
        assert getattr(on.stats, count) == getattr(off.stats, count)
    assert on.stats.num_preemptions > 0


def test_gaps_between_steps_are_counted(llama, make_prompt) -> None:
    llm, _ = _outputs(llama, make_prompt, True)
    assert llm.stats.num_step_gaps == llm.stats.num_steps - 1
    assert llm.stats.step_gap_seconds > 0


def test_time_without_work_is_no_gap(llama) -> None:
    llm = LLM(llama)
    for _ in range(3):
        llm.generate([1], SamplingParams(max_tokens=1))
    assert (llm.stats.num_steps, llm.stats.num_step_gaps) == (3, 0)
