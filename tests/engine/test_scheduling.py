"""Which tokens each step computes."""

import pytest

from chunkcache.engine.waiting import PATIENCE
from chunkcache_testing.fake_engine import FakeEngine, counted, tokens_of


def _prompt(num_tokens: int, begin: int = 0) -> list[int]:
    return list(range(begin, begin + num_tokens))


def test_requests_join_and_leave_between_steps() -> None:
    fake = FakeEngine()
    fake.add(_prompt(5), max_tokens=3)
    fake.add(_prompt(7, 100), max_tokens=5)
    fake.run()
    assert fake.runner.steps == [[5, 7], [1, 1], [1, 1], [1], [1]]


def test_a_request_joins_while_another_decodes() -> None:
    fake = FakeEngine()
    first = fake.add(_prompt(5), max_tokens=20)
    for _ in range(3):
        fake.engine.step()
    second = fake.add(_prompt(9, 100), max_tokens=2)
    fake.run()
    assert [1, 9] in fake.runner.steps
    assert tokens_of(first) == counted(_prompt(5), 20)
    assert tokens_of(second) == counted(_prompt(9, 100), 2)


def test_no_step_has_more_tokens_than_the_budget() -> None:
    fake = FakeEngine(max_num_batched_tokens=10)
    for i in range(6):
        fake.add(_prompt(23, 100 * i), max_tokens=9)
    fake.run()
    assert max(map(sum, fake.runner.steps)) == 10


def test_no_more_sequences_than_allowed_have_a_place() -> None:
    fake = FakeEngine(max_num_seqs=3)
    for i in range(8):
        fake.add(_prompt(5, 100 * i), n=2)
    fake.run()
    assert fake.engine.stats.peak_num_seqs == 3
    assert max(map(len, fake.runner.steps)) == 3


def test_decodes_are_in_every_step_of_a_long_prompt() -> None:
    fake = FakeEngine(max_num_batched_tokens=20)
    running = [fake.add(_prompt(4, 100 * i), max_tokens=60) for i in range(3)]
    for _ in range(5):
        fake.engine.step()
    num_before = len(fake.runner.steps)
    fake.add(_prompt(160, 500), max_tokens=1)
    fake.run()
    pieces = [step for step in fake.runner.steps[num_before:] if max(step) > 1]
    assert [step[:3] for step in pieces] == [[1, 1, 1]] * 10
    assert [step[3] for step in pieces] == [17] * 9 + [7]
    assert all(
        tokens_of(request) == counted(_prompt(4, 100 * i), 60) for i, request in enumerate(running)
    )


def test_without_chunked_prefill_a_prompt_is_computed_in_one_step() -> None:
    fake = FakeEngine(max_num_batched_tokens=200, chunked_prefill=False)
    fake.add(_prompt(4), max_tokens=30)
    for _ in range(3):
        fake.engine.step()
    fake.add(_prompt(160, 500), max_tokens=1)
    fake.run()
    assert [1, 160] in fake.runner.steps


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it() -> None:
    fake = FakeEngine(max_num_batched_tokens=160, chunked_prefill=False)
    fake.add(_prompt(4), max_tokens=5)
    long = fake.add(_prompt(160, 500), max_tokens=1)
    fake.run()
    assert [160] in fake.runner.steps
    assert tokens_of(long) == counted(_prompt(160, 500), 1)


def test_a_better_class_is_served_first() -> None:
    fake = FakeEngine(max_num_seqs=1)
    first = fake.add(_prompt(4))
    fake.engine.step()
    low = fake.add(_prompt(4, 100), priority=1)
    high = fake.add(_prompt(4, 200), priority=-1)
    fake.run()
    ends = [request.output.arrival_time + request.output.latency for request in (first, high, low)]
    assert ends == sorted(ends)


def test_a_better_class_does_not_push_a_running_request_out() -> None:
    fake = FakeEngine(max_num_seqs=1)
    low = fake.add(_prompt(4), max_tokens=20, priority=9)
    fake.engine.step()
    high = fake.add(_prompt(4, 100), priority=0)
    fake.run()
    assert low.output.latency + low.output.arrival_time < (
        high.output.arrival_time + high.output.time_to_first_token
    )


def test_a_low_class_is_served_however_many_come_in_a_better_one() -> None:
    fake = FakeEngine(max_num_seqs=2)
    low = fake.add(_prompt(4, 900), max_tokens=2, priority=3)
    num_others = 0
    while not low.finished:
        if fake.engine.num_unfinished < 5:
            fake.add(_prompt(4, num_others % 800), max_tokens=2)
            num_others += 1
        fake.engine.step()
    assert num_others <= PATIENCE + 8


def test_a_running_prompt_goes_on_however_many_better_ones_come() -> None:
    fake = FakeEngine(max_num_batched_tokens=8, max_num_seqs=8)
    long = fake.add(_prompt(60, 900), max_tokens=1, priority=3)
    fake.engine.step()
    num_steps = 0
    while not long.finished:
        fake.add(_prompt(6, 10 * num_steps), max_tokens=1)
        fake.engine.step()
        num_steps += 1
    assert num_steps <= 70


@pytest.mark.parametrize("overlap", [True, False])
def test_the_next_step_is_planned_before_the_tokens_of_this_one_are_known(overlap) -> None:
    fake = FakeEngine(overlap=overlap)
    request = fake.add(_prompt(4), max_tokens=6)
    known_at_plan = []
    plan = fake.cache.plan

    def planning(*args):
        known_at_plan.append(len(tokens_of(request)))
        return plan(*args)

    fake.cache.plan = planning
    fake.run()
    assert known_at_plan == [0, 0, 1, 2, 3, 4]
    assert tokens_of(request) == counted(_prompt(4), 6)


def test_a_step_that_was_planned_for_one_that_ended_is_thrown_away() -> None:
    fake = FakeEngine()
    ended = fake.add(_prompt(4), max_tokens=9, eos_token_ids=(6,))
    other = fake.add(_prompt(4, 100), max_tokens=9)
    fake.run()
    assert tokens_of(ended) == [4, 5, 6]
    assert tokens_of(other) == counted(_prompt(4, 100), 9)
    assert fake.runner.steps[:4] == [[4, 4], [1, 1], [1, 1], [1, 1]]
    assert set(map(len, fake.runner.steps[4:])) == {1}


def test_samples_fork_from_one_prompt() -> None:
    fake = FakeEngine()
    request = fake.add(_prompt(40), max_tokens=5, n=4)
    fake.run()
    assert [sum(step) for step in fake.runner.steps] == [40, 1, 4, 4, 4, 3]
    assert [sample.token_ids for sample in request.output.outputs] == [counted(_prompt(40), 5)] * 4


def test_samples_without_a_place_begin_later() -> None:
    fake = FakeEngine(max_num_seqs=2)
    request = fake.add(_prompt(40), max_tokens=5, n=7)
    fake.run()
    assert [sample.token_ids for sample in request.output.outputs] == [counted(_prompt(40), 5)] * 7


def test_the_times_of_all_tokens_are_known() -> None:
    fake = FakeEngine()
    output = fake.add(_prompt(4), max_tokens=6).output
    fake.run()
    times = output.outputs[0].token_times
    assert (len(times), times) == (6, sorted(times))
    assert (output.time_to_first_token, output.latency) == (times[0], times[-1])
