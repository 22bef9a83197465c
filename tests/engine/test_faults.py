"""Faults in the model, sampler, planner and text end what they must, and hang nothing."""

import pytest

from chunkcache import EngineError, OutOfChunksError
from chunkcache.engine.picker import TokenPicker
from chunkcache_testing.fake_engine import FailingPicker, FakeEngine, counted, tokens_of

PROMPTS = [list(range(100 * i, 100 * i + 20)) for i in range(4)]

overlapping = pytest.mark.parametrize("overlap", [True, False])


def _fail_at(number: int):
    def before(step: int) -> None:
        if step == number:
            raise FloatingPointError("the device is on fire")

    return before


@overlapping
@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_a_failed_model_step_ends_all_requests_with_a_clear_message(overlap, number) -> None:
    fake = FakeEngine(overlap=overlap)
    requests = [fake.add(prompt) for prompt in PROMPTS]
    fake.runner.before = _fail_at(number)
    with pytest.raises(EngineError, match="the model step failed: FloatingPointError: the device"):
        fake.run()
    for request in requests:
        assert isinstance(request.error, EngineError)
        assert isinstance(request.error.__cause__, FloatingPointError)
    fake.engine.check_accounts()


@overlapping
def test_an_engine_serves_new_requests_after_a_failed_step(overlap) -> None:
    fake = FakeEngine(overlap=overlap)
    fake.add(PROMPTS[0])
    fake.runner.before = _fail_at(2)
    with pytest.raises(EngineError):
        fake.run()
    fake.runner.before = lambda step: None
    request = fake.add(PROMPTS[1])
    fake.run()
    assert tokens_of(request) == counted(PROMPTS[1])


def test_a_step_planned_behind_a_failed_one_is_not_run() -> None:
    fake = FakeEngine()
    fake.add(PROMPTS[0])
    fake.runner.before = _fail_at(1)
    with pytest.raises(EngineError):
        fake.run()
    assert len(fake.runner.steps) == 1


@overlapping
def test_a_sampler_that_fails_for_one_request_ends_that_one_alone(overlap) -> None:
    fake = FakeEngine(overlap=overlap, picker=FailingPicker({13}))
    good = fake.add(PROMPTS[0])
    bad = fake.add(PROMPTS[1], seed=13)
    fake.run()
    assert tokens_of(good) == counted(PROMPTS[0])
    assert str(bad.error) == "request 1 failed: RuntimeError: no dice"
    fake.engine.check_accounts()


def test_a_sampler_that_fails_for_one_sample_ends_all_of_its_request() -> None:
    class FailsLater(TokenPicker):
        num_steps = 0

        def pick(self, logits, picks):
            picked = super().pick(logits, picks)
            self.num_steps += 1
            if self.num_steps == 4:
                picked.errors[len(picks) - 1] = RuntimeError("no dice")
            return picked

    fake = FakeEngine(picker=FailsLater())
    request = fake.add(PROMPTS[0], n=3)
    fake.run()
    assert isinstance(request.error, EngineError)
    fake.engine.check_accounts()


@overlapping
def test_a_sampler_that_fails_altogether_ends_all_requests(overlap) -> None:
    fake = FakeEngine(overlap=overlap, picker=FailingPicker({13}, altogether=True))
    requests = [fake.add(PROMPTS[0]), fake.add(PROMPTS[1], seed=13)]
    with pytest.raises(
        EngineError, match="picking the step's tokens failed: RuntimeError: no dice"
    ):
        fake.run()
    assert all(request.error for request in requests)
    fake.engine.check_accounts()


@overlapping
@pytest.mark.parametrize("where", ["plan", "reserve", "append_batch", "commit"])
def test_a_planner_that_fails_for_no_one_alone_ends_all_requests(overlap, where) -> None:
    fake = FakeEngine(overlap=overlap)
    requests = [fake.add(prompt) for prompt in PROMPTS]
    original = getattr(fake.cache, where)
    calls = []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyError("lost")
        return original(*args)

    setattr(fake.cache, where, failing)
    with pytest.raises(EngineError, match="planning or ending a step failed: KeyError: 'lost'"):
        fake.run()
    assert all(isinstance(request.error, EngineError) for request in requests)
    fake.engine.check_accounts()


class _Fault:
    """Makes an operation of a cache fail for one prompt, or for the sequence of that prompt."""

    def __init__(self, fake: FakeEngine, where: str, prompt: list[int]) -> None:
        self._fake = fake
        self._prompt = prompt
        self._original = getattr(fake.cache, where)
        self.num_raised = 0
        setattr(fake.cache, where, self)

    def __call__(self, first, *args):
        tokens = [first] if isinstance(first, int) else list(first)
        running = {seq.handle: seq.request for seq in self._fake.scheduler.running}
        handles = [running[token] for token in tokens if token in running]
        named = any(request.prompt_token_ids == self._prompt for request in handles)
        if named or tokens[: len(self._prompt)] == self._prompt:
            self.num_raised += 1
            raise KeyError("lost")
        return self._original(first, *args)


@overlapping
@pytest.mark.parametrize("where", ["match_prefix", "insert", "plan", "reserve", "append_batch"])
def test_a_planner_that_fails_for_one_request_ends_that_one_alone(overlap, where) -> None:
    fake = FakeEngine(overlap=overlap)
    # Handles are small: no token of the prompts is one.
    prompts = [[token + 500 for token in prompt] for prompt in PROMPTS]
    requests = [fake.add(prompt) for prompt in prompts]
    original = getattr(fake.cache, where)
    fault = _Fault(fake, where, prompts[2])
    while fault.num_raised == 0:
        fake.engine.step()
    setattr(fake.cache, where, original)
    fake.run()
    for index, request in enumerate(requests):
        if index != 2:
            assert request.error is None
            assert tokens_of(request) == counted(prompts[index])
    assert str(requests[2].error) == "request 2 failed: KeyError: 'lost'"
    assert isinstance(requests[2].error.__cause__, KeyError)
    fake.engine.check_accounts()


@overlapping
def test_a_planner_that_always_fails_for_two_requests_ends_both_alone(overlap) -> None:
    fake = FakeEngine(overlap=overlap)
    prompts = [[token + 500 for token in prompt] for prompt in PROMPTS]
    requests = [fake.add(prompt) for prompt in prompts]
    for index in (0, 3):
        _Fault(fake, "plan", prompts[index])
    fake.run()
    assert [request.error is None for request in requests] == [False, True, True, False]
    assert tokens_of(requests[1]) == counted(prompts[1])
    fake.engine.check_accounts()


@overlapping
def test_a_sequence_that_cannot_be_removed_at_first_fails_alone_and_leaves_later(overlap) -> None:
    fake = FakeEngine(overlap=overlap)
    requests = [fake.add(prompt, max_tokens=4 + i) for i, prompt in enumerate(PROMPTS)]
    original = fake.cache.remove

    def failing(handle: int):
        fake.cache.remove = original
        raise KeyError("lost")

    fake.cache.remove = failing
    fake.run()
    assert str(requests[0].error) == "request 0 failed: KeyError: 'lost'"
    assert [tokens_of(request) for request in requests[1:]] == [
        counted(PROMPTS[i], 4 + i) for i in (1, 2, 3)
    ]
    fake.engine.check_accounts()


@overlapping
def test_a_fork_that_fails_ends_its_request_alone(overlap) -> None:
    fake = FakeEngine(overlap=overlap)
    good, bad = fake.add(PROMPTS[0]), fake.add(PROMPTS[1], n=3)
    fake.cache.fork = lambda handle: 1 / 0
    fake.run()
    assert tokens_of(good) == counted(PROMPTS[0])
    assert isinstance(bad.error.__cause__, ZeroDivisionError)
    fake.engine.check_accounts()


@overlapping
@pytest.mark.parametrize("where", ["rewind", "wanted"])
def test_prompt_logprobs_that_cannot_be_planned_end_their_request_alone(overlap, where) -> None:
    fake = FakeEngine(overlap=overlap)
    good, bad = fake.add(PROMPTS[0]), fake.add(PROMPTS[1], prompt_logprobs=1)
    setattr(fake.cache if where == "rewind" else bad.prompt_logprobs, where, lambda *_: 1 / 0)
    fake.run()
    assert tokens_of(good) == counted(PROMPTS[0])
    assert isinstance(bad.error.__cause__, ZeroDivisionError)
    fake.engine.check_accounts()


def test_one_that_takes_a_prompt_over_and_fails_ends_alone() -> None:
    fake = FakeEngine(max_num_batched_tokens=16)
    prompt = list(range(100))
    first, heir, other = fake.add(prompt), fake.add(prompt), fake.add(PROMPTS[3])
    fake.engine.step()
    fake.cache.match_prefix = lambda *_: 1 / 0
    fake.engine.abort([first])
    del fake.cache.match_prefix
    fake.run()
    assert isinstance(heir.error.__cause__, ZeroDivisionError)
    assert other.error is None or isinstance(other.error.__cause__, ZeroDivisionError)
    fake.engine.check_accounts()


def test_a_text_that_cannot_be_made_ends_its_request_alone() -> None:
    fake = FakeEngine()
    good, bad = fake.add(PROMPTS[0]), fake.add(PROMPTS[1])
    bad.sequences[0].accept = lambda *args, **kwargs: 1 / 0
    fake.run()
    assert tokens_of(good) == counted(PROMPTS[0])
    assert isinstance(bad.error.__cause__, ZeroDivisionError)
    fake.engine.check_accounts()


def test_an_interrupted_step_leaves_nothing_behind() -> None:
    fake = FakeEngine(overlap=False)
    requests = [fake.add(prompt) for prompt in PROMPTS]
    fake.engine.step()
    fake.scheduler.schedule = lambda step_in_flight: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        fake.engine.step()
    assert all(isinstance(request.error, EngineError) for request in requests)
    fake.engine.check_accounts()


@pytest.mark.parametrize(("overlap", "error"), [(True, EngineError), (False, KeyboardInterrupt)])
def test_an_interrupted_model_step_leaves_nothing_behind(overlap, error) -> None:
    fake = FakeEngine(overlap=overlap)
    fake.add(PROMPTS[0])

    def interrupt(step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt

    fake.runner.before = interrupt
    with pytest.raises(error):
        fake.run()
    fake.engine.check_accounts()
    fake.runner.before = lambda step: None
    request = fake.add(PROMPTS[1])
    fake.run()
    assert tokens_of(request) == counted(PROMPTS[1])


def test_one_that_outgrows_a_pinned_pool_is_ended_alone() -> None:
    fake = FakeEngine(capacity=6)
    kept = fake.add(list(range(64)), max_tokens=1)
    fake.run()
    fake.cache.pin(kept.prompt_token_ids)
    grows = fake.add(PROMPTS[3], max_tokens=40)
    small = fake.add(PROMPTS[2], max_tokens=5)
    fake.run()
    assert isinstance(grows.error, OutOfChunksError)
    assert tokens_of(small) == counted(PROMPTS[2], 5)
    fake.engine.check_accounts()
