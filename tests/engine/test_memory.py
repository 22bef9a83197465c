"""The pool: its size, who is refused, who is set aside, and that nothing is lost."""

import pytest
import torch

from chunkcache import ChunkCacheError, InvalidConfigError, OutOfChunksError
from chunkcache.engine import LLM, EngineConfig, SamplingParams, capacity
from chunkcache_testing.fake_engine import FakeEngine, counted, tokens_of

CPU = torch.device("cpu")


@pytest.fixture
def spec(llama):
    return LLM(llama, capacity=1).spec


def test_a_fraction_of_the_free_memory(spec, monkeypatch) -> None:
    monkeypatch.setattr(capacity, "_available_bytes", lambda device: 1000)
    config = EngineConfig(memory_fraction=0.25)
    assert capacity.pool_capacity(config, spec, 10, CPU) == 25


def test_the_default_is_what_the_limits_can_use(spec, monkeypatch) -> None:
    monkeypatch.setattr(capacity, "_available_bytes", lambda device: 10**12)
    config = EngineConfig(max_num_seqs=3, max_model_len=100, chunk_size=16)
    assert capacity.pool_capacity(config, spec, 10, CPU) == 3 * 7


def test_a_fraction_below_a_chunk_is_refused(spec, monkeypatch) -> None:
    monkeypatch.setattr(capacity, "_available_bytes", lambda device: 1000)
    with pytest.raises(InvalidConfigError, match="memory_fraction is"):
        capacity.pool_capacity(EngineConfig(memory_fraction=0.01), spec, 11, CPU)


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, float("nan"), "half", True])
def test_a_fraction_must_be_one(fraction) -> None:
    with pytest.raises(InvalidConfigError, match="memory_fraction"):
        EngineConfig(memory_fraction=fraction)


def test_two_sizes_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="capacity and memory_fraction are given"):
        EngineConfig(capacity=5, memory_fraction=0.5)


def test_the_youngest_of_the_lowest_class_is_set_aside() -> None:
    fake = FakeEngine(capacity=7)
    first_low = fake.add(list(range(10)), max_tokens=30, priority=2)
    second_low = fake.add(list(range(100, 110)), max_tokens=30, priority=2)
    high = fake.add(list(range(200, 210)), max_tokens=30, priority=0)
    fake.run()
    assert fake.engine.stats.num_preemptions > 0
    for request, begin in ((first_low, 0), (second_low, 100), (high, 200)):
        assert tokens_of(request) == counted(list(range(begin, begin + 10)), 30)
    assert second_low.output.latency > max(first_low.output.latency, high.output.latency)


def test_what_was_set_aside_is_found_again_in_the_cache() -> None:
    fake = FakeEngine(capacity=12)
    for i in range(3):
        fake.add(list(range(100 * i, 100 * i + 64)), max_tokens=40)
    fake.run()
    stats = fake.engine.stats
    assert stats.num_preemptions > 0
    assert stats.num_prompt_tokens_computed < 3 * 64 + 64


def test_one_that_can_never_fit_is_refused_alone(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16, capacity=4)
    running = llm.request(make_prompt(20), SamplingParams(max_tokens=9))
    llm.engine.add([running])
    llm.engine.step()
    with pytest.raises(OutOfChunksError, match="needs 5 chunks of 16 tokens; the pool has 4"):
        llm.request(make_prompt(60), SamplingParams(max_tokens=6))
    while llm.engine.num_unfinished:
        llm.engine.step()
    assert len(running.output.outputs[0].token_ids) == 9


def test_one_that_does_not_fit_beside_pins_is_refused_at_once(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16, capacity=6)
    kept = make_prompt(64)
    llm.generate(kept, SamplingParams(max_tokens=1))
    llm.cache.pin(kept)
    num_steps = llm.stats.num_steps
    with pytest.raises(OutOfChunksError, match="4 are pinned for others"):
        llm.generate(make_prompt(40, seed=1), SamplingParams(max_tokens=1))
    assert llm.stats.num_steps == num_steps


def test_one_that_goes_on_from_what_is_pinned_is_served(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16, capacity=6)
    kept = make_prompt(64)
    llm.generate(kept, SamplingParams(max_tokens=1))
    llm.cache.pin(kept)
    output = llm.generate([*kept, 1, 2, 3], SamplingParams(max_tokens=20))[0]
    assert (output.cached_tokens, len(output.outputs[0].token_ids)) == (64, 20)


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("overlap", [True, False])
def test_an_abort_at_any_step_leaves_nothing_behind(num_steps, overlap) -> None:
    fake = FakeEngine(capacity=40, overlap=overlap, max_num_batched_tokens=30)
    requests = [fake.add(list(range(50)), max_tokens=5, n=1 + i % 2) for i in range(4)]
    for _ in range(num_steps):
        fake.engine.step()
    fake.engine.abort(requests)
    fake.engine.check_accounts()


def test_a_request_that_is_abandoned_in_the_middle_of_a_step_leaves_nothing_behind() -> None:
    fake = FakeEngine(overlap=False)
    requests = [fake.add([1, 2, 3]), fake.add([4, 5, 6])]
    # As the garbage collector may do, in the thread that steps.
    fake.runner.before = lambda step: fake.engine.abort(requests[:1])
    fake.run()
    assert (tokens_of(requests[0]), tokens_of(requests[1])) == ([4], counted([4, 5, 6]))
    fake.engine.check_accounts()


def test_aborting_twice_is_aborting_once() -> None:
    fake = FakeEngine()
    requests = [fake.add([1, 2, 3])]
    fake.engine.step()
    fake.engine.abort(requests)
    fake.engine.abort(requests)
    fake.engine.check_accounts()


def test_a_lost_chunk_is_found() -> None:
    fake = FakeEngine()
    fake.cache.insert([1, 2, 3])
    with pytest.raises(ChunkCacheError, match="the cache has 1 sequences, the engine runs 0"):
        fake.engine.check_accounts()


def test_pinned_chunks_are_not_lost() -> None:
    fake = FakeEngine()
    fake.add(list(range(40)), max_tokens=1)
    fake.run()
    fake.cache.pin(list(range(40)))
    fake.engine.check_accounts()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_model_len": -1}, "max_model_len is -1"),
        ({"max_model_len": 513}, "allowed for this model is at most 512"),
        ({"enable_chunked_prefill": 1}, "enable_chunked_prefill is 1"),
        ({"enable_overlap": None}, "enable_overlap is None"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 511},
            "allowed without chunked prefill is at least the length of a sequence, 512",
        ),
    ],
)
def test_limits_that_make_no_sense_are_refused(llama, options, message) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        LLM(llama, **options)
