"""`AsyncLLM`: many callers, each awaiting its own request."""

import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

import chunkcache
import chunkcache_testing
from chunkcache import EngineError, InvalidConfigError, OutOfChunksError
from chunkcache.engine import LLM, AsyncLLM, SamplingParams
from chunkcache_testing.async_callers import last_of, run_scenario

PARAMS = SamplingParams(max_tokens=12)
LONG = SamplingParams(max_tokens=200)


async def _begin(llm: AsyncLLM, prompt, request_id: str) -> tuple[asyncio.Task, asyncio.Event]:
    """Start a request in a task, and return when it has its first token."""
    begun = asyncio.Event()

    async def read():
        last = None
        async for output in llm.generate(prompt, LONG, request_id=request_id):
            begun.set()
            last = output
        return last

    task = asyncio.create_task(read())
    await asyncio.wait({task, asyncio.create_task(begun.wait())}, return_when="FIRST_COMPLETED")
    return task


def test_each_output_has_all_before_it(llama, make_prompt) -> None:
    async def scenario(llm):
        return [output async for output in llm.generate(make_prompt(30), PARAMS)]

    outputs = run_scenario(llama, scenario)
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert all(tokens[-1][: len(some)] == some for some in tokens)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_tokens_are_those_of_llm(llama, make_prompt) -> None:
    prompts = [make_prompt(20 + i, seed=i) for i in range(6)]

    async def scenario(llm):
        return await asyncio.gather(*(last_of(llm.generate(prompt, PARAMS)) for prompt in prompts))

    together = [output.outputs[0].token_ids for output in run_scenario(llama, scenario)]
    alone = LLM(llama, chunk_size=16).generate(prompts, PARAMS)
    assert together == [output.outputs[0].token_ids for output in alone]


def test_streamed_pieces_add_up(llama, tokenizer) -> None:
    async def scenario(llm):
        pieces = [piece async for piece in llm.stream("hello", PARAMS)]
        return pieces, await last_of(llm.generate("hello", PARAMS))

    pieces, whole = run_scenario(llama, scenario, tokenizer=tokenizer)
    assert "".join(piece.text for piece in pieces) == whole.outputs[0].text
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert tokens == whole.outputs[0].token_ids


def test_a_slow_reader_of_a_stream_gets_every_piece(llama, make_prompt) -> None:
    async def scenario(llm):
        slow = llm.stream(make_prompt(9), PARAMS)
        first = await anext(slow)
        await last_of(llm.generate(make_prompt(40, seed=1), LONG))
        return [first] + [piece async for piece in slow]

    pieces = run_scenario(llama, scenario)
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert tokens == pieces[-1].request.outputs[0].token_ids
    assert len(tokens) == 12


def test_a_slow_reader_gets_everything(llama, make_prompt) -> None:
    async def scenario(llm):
        slow = llm.generate(make_prompt(9), PARAMS)
        await anext(slow)
        await last_of(llm.generate(make_prompt(40, seed=1), LONG))
        return await last_of(slow)

    assert len(run_scenario(llama, scenario).outputs[0].token_ids) == 12


def test_abort_ends_a_request_with_what_there_is(llama, make_prompt) -> None:
    async def scenario(llm):
        task = await _begin(llm, make_prompt(30), "mine")
        await llm.abort("mine")
        return await task

    output = run_scenario(llama, scenario)
    assert output.outputs[0].finish_reason == "abort"
    assert 0 < len(output.outputs[0].token_ids) < 200


def test_abort_ends_a_stream_with_a_piece_that_says_so(llama, make_prompt) -> None:
    async def scenario(llm):
        pieces = []
        async for piece in llm.stream(make_prompt(30), LONG, request_id="mine"):
            if not pieces:
                await llm.abort("mine")
            pieces.append(piece)
        return pieces

    pieces = run_scenario(llama, scenario)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["abort"]
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert tokens == pieces[-1].request.outputs[0].token_ids


def test_abort_of_an_unknown_request_does_nothing(llama) -> None:
    async def scenario(llm):
        await llm.abort("nobody")
        return await last_of(llm.generate([1, 2], PARAMS))

    assert len(run_scenario(llama, scenario).outputs[0].token_ids) == 12


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_cancelling_the_reader_aborts_the_request(llama, make_prompt, num_tokens) -> None:
    async def scenario(llm):
        async def read():
            count = 0
            async for _ in llm.generate(make_prompt(30), LONG):
                count += 1
                if count == num_tokens:
                    reading.set()

        reading = asyncio.Event()
        task = asyncio.create_task(read())
        if num_tokens:
            await reading.wait()
        else:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await llm.check_accounts()
        return llm.llm.engine.num_unfinished

    assert run_scenario(llama, scenario) == 0


def test_leaving_the_loop_aborts_the_request(llama, make_prompt) -> None:
    async def scenario(llm):
        async for _ in llm.generate(make_prompt(30), LONG, request_id="a"):
            break
        # The event loop closes the iterator, and the name is free again.
        for _ in range(10):
            await asyncio.sleep(0)
        return await last_of(llm.generate(make_prompt(30), PARAMS, request_id="a"))

    assert len(run_scenario(llama, scenario).outputs[0].token_ids) == 12


def test_a_time_out_aborts_the_request(llama, make_prompt) -> None:
    async def scenario(llm):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(last_of(llm.generate(make_prompt(30), LONG)), 0.01)
        await llm.check_accounts()
        return llm.llm.engine.num_unfinished

    assert run_scenario(llama, scenario) == 0


def test_a_name_in_use_is_refused(llama, make_prompt) -> None:
    async def scenario(llm):
        task = await _begin(llm, make_prompt(30), "same")
        with pytest.raises(InvalidConfigError, match="request_id is 'same'"):
            await last_of(llm.generate([1, 2], PARAMS, request_id="same"))
        return await task

    assert len(run_scenario(llama, scenario).outputs[0].token_ids) == 200


def test_a_refused_request_concerns_no_other(llama, make_prompt) -> None:
    async def scenario(llm):
        task = await _begin(llm, make_prompt(30), "good")
        with pytest.raises(OutOfChunksError):
            await last_of(llm.generate(make_prompt(400), PARAMS))
        with pytest.raises(InvalidConfigError, match="token id"):
            await last_of(llm.generate([-1], PARAMS))
        return await task

    assert len(run_scenario(llama, scenario, capacity=20).outputs[0].token_ids) == 200


def test_an_error_of_the_engine_reaches_every_waiter(llama, make_prompt, monkeypatch) -> None:
    async def scenario(llm):
        tasks = [await _begin(llm, make_prompt(30, seed=i), str(i)) for i in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(llama.lm_head, "forward", lambda _: 1 / 0)
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        return errors, await last_of(llm.generate([1, 2], PARAMS))

    errors, output = run_scenario(llama, scenario)
    assert [type(error) for error in errors] == [EngineError] * 3
    assert len(output.outputs[0].token_ids) == 12


def test_an_engine_thread_that_fails_ends_every_waiter(llama, make_prompt) -> None:
    async def main():
        llm = AsyncLLM(llama, chunk_size=16)
        task = await _begin(llm, make_prompt(30), "mine")
        llm.llm.engine.step = lambda: 1 / 0
        with pytest.raises(EngineError, match="thread failed: ZeroDivisionError"):
            await task
        with pytest.raises(EngineError, match="thread failed"):
            await last_of(llm.generate([1], PARAMS))
        await llm.shutdown()

    asyncio.run(main())


def test_shutdown_ends_who_waits_and_who_comes_later(llama, make_prompt) -> None:
    async def main():
        llm = AsyncLLM(llama, chunk_size=16)
        task = await _begin(llm, make_prompt(30), "mine")
        await llm.shutdown()
        with pytest.raises(EngineError, match="shut down"):
            await task
        with pytest.raises(EngineError, match="shut down"):
            await last_of(llm.generate([1], PARAMS))
        await llm.shutdown()
        llm.llm.check_accounts()

    asyncio.run(main())


def test_a_reader_whose_event_loop_is_gone_is_aborted(llama, make_prompt) -> None:
    llm = AsyncLLM(llama, chunk_size=16)

    async def leave_in_the_middle():
        outputs = llm.generate(make_prompt(30), LONG)
        await anext(outputs)
        return outputs

    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(leave_in_the_middle())
    loop.close()
    asyncio.run(llm.check_accounts())
    asyncio.run(llm.shutdown())
    llm.llm.check_accounts()
    del kept


def test_salts_keep_requests_apart(llama, make_prompt) -> None:
    async def scenario(llm):
        outputs = [
            await last_of(llm.generate(make_prompt(64), PARAMS, cache_salt=salt)) for salt in "aba"
        ]
        return [output.cached_tokens for output in outputs]

    assert run_scenario(llama, scenario) == [0, 0, 64]


def test_it_may_run_beside_the_blocking_calls_of_the_same_engine(llama, make_prompt) -> None:
    async def scenario(llm):
        blocking = asyncio.to_thread(llm.llm.generate, make_prompt(30, seed=1), LONG)
        return await asyncio.gather(last_of(llm.generate(make_prompt(30), LONG)), blocking)

    own, (other,) = run_scenario(llama, scenario)
    assert [len(output.outputs[0].token_ids) for output in (own, other)] == [200, 200]


def test_an_engine_that_is_forgotten_ends_its_thread(llama) -> None:
    llm = AsyncLLM(llama)
    thread = llm._thread._thread
    del llm
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_a_program_that_forgets_to_shut_down_ends() -> None:
    code = """
import asyncio
from chunkcache.engine import AsyncLLM
from chunkcache_testing.tiny_models import CONFIGS, make_model

llm = AsyncLLM(make_model(CONFIGS["llama"]()))

async def main():
    async for output in llm.generate([1, 2, 3]):
        break

asyncio.run(main())
"""
    testing = Path(chunkcache_testing.__file__).parents[1]
    paths = [str(testing), str(Path(chunkcache.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("enable_overlap", [True, False])
def test_a_request_that_cannot_be_planned_fails_alone(llama, make_prompt, enable_overlap) -> None:
    good, bad = make_prompt(30), make_prompt(31, seed=1)

    async def scenario(llm):
        cache = llm.llm.cache
        insert = cache.insert

        def failing(tokens, cache_salt=""):
            if len(tokens) == 31:
                raise KeyError("lost")
            return insert(tokens, cache_salt)

        cache.insert = failing
        requests = [last_of(llm.generate(prompt, PARAMS)) for prompt in (good, bad)]
        return await asyncio.gather(*requests, return_exceptions=True)

    served, failed = run_scenario(llama, scenario, enable_overlap=enable_overlap)
    assert served.finished
    assert isinstance(failed, EngineError)
    assert "KeyError: 'lost'" in str(failed)
