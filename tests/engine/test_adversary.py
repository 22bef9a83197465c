"""What callers of an `AsyncLLM` do to it at any moment, and what the others get all the same."""

import asyncio
import random
import threading

import pytest

from chunkcache import EngineError, InvalidConfigError, OutOfChunksError
from chunkcache.engine import LLM, AsyncLLM, SamplingParams
from chunkcache_testing.async_callers import last_of, run_scenario

PARAMS = SamplingParams(max_tokens=12)
LONG = SamplingParams(max_tokens=200)
SEEDED = {"temperature": 1.0, "seed": 11, "max_tokens": 20}
SAMPLED = [
    SamplingParams(**SEEDED),
    SamplingParams(**SEEDED, n=3, top_k=20, repetition_penalty=1.3),
    SamplingParams(**SEEDED, guided_regex="[a-z]{3,9}(, [a-z]{2,6}){1,3}", frequency_penalty=0.5),
    SamplingParams(**SEEDED, min_p=0.02, stop=["e", "qu"], n=2, presence_penalty=1.0),
    SamplingParams(**SEEDED, prompt_logprobs=2, logprobs=1, min_tokens=6),
]


def test_a_caller_may_be_cancelled_at_any_of_its_awaits(llama, make_prompt) -> None:
    prompt = make_prompt(30)

    async def scenario(llm):
        ends = set()
        for num_turns in range(60):
            task = asyncio.create_task(last_of(llm.generate(prompt, PARAMS, request_id="mine")))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            ends.add(task.cancelled())
            await llm.check_accounts()
            assert llm.llm.engine.num_unfinished == 0
        return ends, await last_of(llm.generate(prompt, PARAMS, request_id="mine"))

    ends, output = run_scenario(llama, scenario)
    assert True in ends
    alone = LLM(llama, chunk_size=16).generate(prompt, PARAMS)[0]
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_caller_may_be_cancelled_while_it_closes(llama, make_prompt) -> None:
    async def scenario(llm):
        outputs = llm.generate(make_prompt(30), LONG, request_id="mine")
        await anext(outputs)
        closing = asyncio.create_task(outputs.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        await llm.check_accounts()
        return await last_of(llm.generate([1, 2], PARAMS, request_id="mine"))

    assert len(run_scenario(llama, scenario).outputs[0].token_ids) == 12


def test_half_characters_in_a_salt_are_refused_before_anything_has_begun(llama) -> None:
    async def scenario(llm):
        with pytest.raises(InvalidConfigError, match=r"cache_salt has .*allowed is text without"):
            await last_of(llm.generate([1, 2], PARAMS, cache_salt="a\ud800"))
        return llm.stats.num_steps

    assert run_scenario(llama, scenario) == 0


def test_iterators_that_nobody_reads_are_no_requests(llama) -> None:
    async def scenario(llm):
        kept = [llm.generate([1, 2], LONG, request_id="same") for _ in range(10)]
        output = await last_of(llm.generate([1, 2], PARAMS, request_id="same"))
        for outputs in kept:
            await outputs.aclose()
        return output

    assert len(run_scenario(llama, scenario).outputs[0].token_ids) == 12


def test_a_name_is_free_when_its_request_has_been_aborted(llama, make_prompt) -> None:
    async def scenario(llm):
        outputs = llm.generate(make_prompt(30), LONG, request_id="mine")
        await anext(outputs)
        await llm.abort("mine")
        # The reader of the first one has not taken its end yet.
        second = await last_of(llm.generate(make_prompt(30), PARAMS, request_id="mine"))
        return await last_of(outputs), second

    first, second = run_scenario(llama, scenario)
    assert first.outputs[0].finish_reason == "abort"
    assert len(second.outputs[0].token_ids) == 12


def test_the_end_of_an_aborted_request_leaves_its_successor_alone(llama, make_prompt) -> None:
    async def scenario(llm):
        first = llm.generate(make_prompt(30), LONG, request_id="mine")
        await anext(first)
        await llm.abort("mine")
        second = llm.generate(make_prompt(30), LONG, request_id="mine")
        await anext(second)
        await last_of(first)
        with pytest.raises(InvalidConfigError, match="request_id is 'mine'"):
            await last_of(llm.generate([1], PARAMS, request_id="mine"))
        await llm.abort("mine")
        return await last_of(second)

    assert run_scenario(llama, scenario).outputs[0].finish_reason == "abort"


def test_of_two_threads_that_take_a_name_one_gets_it(llama, monkeypatch) -> None:
    llm = AsyncLLM(llama, chunk_size=16)
    both = threading.Barrier(2)
    make = llm.llm.request

    def making(*args, **options):
        request = make(*args, **options)
        both.wait(30)
        return request

    monkeypatch.setattr(llm.llm, "request", making)
    outcomes = []

    def call() -> None:
        try:
            output = asyncio.run(last_of(llm.generate([1, 2], PARAMS, request_id="same")))
            outcomes.append(len(output.outputs[0].token_ids))
        except InvalidConfigError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(llm.shutdown())
    assert 12 in outcomes
    assert sum("request_id is 'same'" in str(outcome) for outcome in outcomes) == 1


def test_an_abort_waits_for_a_step_of_another_thread(llama, make_prompt) -> None:
    """On return the request has left, also where the engine was busy for somebody else."""
    busy = SamplingParams(max_tokens=40)

    async def scenario(llm):
        engine = llm.llm.engine
        outputs = llm.generate(make_prompt(30), LONG, request_id="mine")
        await anext(outputs)
        other = asyncio.create_task(asyncio.to_thread(llm.llm.generate, [1, 2, 3], busy))
        while engine.num_unfinished < 2:
            await asyncio.sleep(0)
        await llm.abort("mine")
        num_left = engine.num_unfinished
        await last_of(outputs)
        (result,) = await other
        return num_left, result

    for _ in range(5):
        num_left, result = run_scenario(llama, scenario)
        assert num_left <= 1
        assert len(result.outputs[0].token_ids) == 40


def test_samples_are_aborted_together(llama, tokenizer) -> None:
    async def scenario(llm):
        params = SamplingParams(max_tokens=100, n=4, temperature=1.0, seed=1, stop=["zzz"])
        pieces = llm.stream("hello", params, request_id="mine")
        seen = {}
        async for piece in pieces:
            sample = seen.setdefault(piece.index, [])
            sample.append(piece)
            if len(seen) == 4 and len(seen[3]) == 3:
                await llm.abort("mine")
        return seen

    seen = run_scenario(llama, scenario, tokenizer=tokenizer)
    assert [seen[index][-1].finish_reason for index in range(4)] == ["abort"] * 4
    assert all(piece.finish_reason is None for index in range(4) for piece in seen[index][:-1])


@pytest.mark.parametrize("params", SAMPLED, ids=range(len(SAMPLED)))
def test_draws_depend_on_the_request_alone_whatever_others_do(
    llama, tokenizer, make_prompt, params
) -> None:
    prompt = "once upon a time there was a "
    alone = LLM(llama, tokenizer, chunk_size=16).generate(prompt, params)[0]
    expected = [(output.token_ids, output.text) for output in alone.outputs]
    source = random.Random(5)

    async def disturb(llm, number):
        await asyncio.sleep(source.uniform(0, 0.1))
        others = SamplingParams(max_tokens=source.randint(1, 40), temperature=1.0, n=2)
        given = prompt if number % 3 == 0 else make_prompt(source.randint(1, 50), seed=number)
        task = asyncio.create_task(last_of(llm.generate(given, others, priority=number % 3 - 1)))
        await asyncio.sleep(source.uniform(0, 0.1))
        if number % 2:
            task.cancel()
        await asyncio.wait({task})

    async def scenario(llm):
        disturbing = [asyncio.create_task(disturb(llm, number)) for number in range(30)]
        found = []
        for _ in range(3):
            output = await last_of(llm.generate(prompt, params))
            found.append([(sample.token_ids, sample.text) for sample in output.outputs])
        await asyncio.gather(*disturbing)
        return found, llm.stats.num_preemptions

    found, _ = run_scenario(
        llama, scenario, tokenizer=tokenizer, capacity=24, max_num_seqs=8, max_num_batched_tokens=40
    )
    assert found == [expected] * 3


def test_prompt_logprobs_of_cached_prompts_are_those_of_fresh_ones(llama, make_prompt) -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    prompt = make_prompt(70)

    async def scenario(llm):
        outputs = await asyncio.gather(*(last_of(llm.generate(prompt, params)) for _ in range(4)))
        return [*outputs, await last_of(llm.generate(prompt, params))]

    first, *others = run_scenario(llama, scenario, max_num_batched_tokens=48)
    for output in others:
        for one, other in zip(first.prompt_logprobs[1:], output.prompt_logprobs[1:], strict=True):
            assert one.keys() == other.keys()
            for token, entry in one.items():
                assert entry.logprob == pytest.approx(other[token].logprob, abs=1e-4)


def test_no_class_starves_while_a_better_one_keeps_coming(llama, make_prompt) -> None:
    async def scenario(llm):
        over = asyncio.Event()

        async def better(number):
            while not over.is_set():
                await last_of(llm.generate(make_prompt(8, seed=number), PARAMS, priority=-1))

        crowd = [asyncio.create_task(better(number)) for number in range(6)]
        await asyncio.sleep(0.05)
        output = await last_of(llm.generate(make_prompt(9), PARAMS, priority=5))
        over.set()
        await asyncio.gather(*crowd)
        return output

    assert len(run_scenario(llama, scenario, max_num_seqs=2).outputs[0].token_ids) == 12


def test_shutdown_at_any_moment_ends_every_caller(llama, make_prompt) -> None:
    async def main(num_turns):
        llm = AsyncLLM(llama, chunk_size=16, capacity=20, max_num_seqs=4)
        tasks = [
            asyncio.create_task(last_of(llm.generate(make_prompt(20, seed=i), LONG)))
            for i in range(8)
        ]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await llm.shutdown()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        llm.llm.check_accounts()
        return ends

    for num_turns in (0, 1, 2, 3, 5, 8, 13, 40):
        for end in asyncio.run(main(num_turns)):
            assert isinstance(end, EngineError | OutOfChunksError)


def test_an_event_loop_that_is_closed_with_its_callers_leaves_nothing(llama, make_prompt) -> None:
    llm = AsyncLLM(llama, chunk_size=16)
    for num_turns in (0, 1, 2, 3, 10):
        loop = asyncio.new_event_loop()

        async def begin(num_turns=num_turns):
            tasks = [
                asyncio.ensure_future(last_of(llm.generate(make_prompt(20, seed=i), LONG)))
                for i in range(3)
            ]
            for _ in range(num_turns):
                await asyncio.sleep(0)
            return tasks

        tasks = loop.run_until_complete(begin())
        for task in tasks:
            # Nobody will await it, and it is not to be said.
            task._log_destroy_pending = False
        loop.close()
        asyncio.run(_settled(llm))
        del tasks
    asyncio.run(llm.shutdown())
    llm.llm.check_accounts()


async def _settled(llm) -> None:
    while llm.llm.engine.num_unfinished:
        await asyncio.sleep(0.001)
    await llm.check_accounts()
