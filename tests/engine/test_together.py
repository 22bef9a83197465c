"""Equal prompts that come together are computed once."""

import pytest

from chunkcache_testing.fake_engine import FakeEngine, counted, tokens_of


def _prompt(num_tokens: int, begin: int = 0) -> list[int]:
    return list(range(begin, begin + num_tokens))


@pytest.mark.parametrize("num_tokens", [16, 70, 64])
@pytest.mark.parametrize("budget", [256, 24])
def test_fifty_equal_prompts_are_computed_once(num_tokens, budget) -> None:
    fake = FakeEngine(max_num_batched_tokens=budget)
    prompt = _prompt(num_tokens)
    requests = [fake.add(prompt, max_tokens=3) for _ in range(50)]
    fake.run()
    # Each one needs the logits of its last token.
    assert fake.engine.stats.num_prompt_tokens_computed == num_tokens + 49
    assert all(tokens_of(request) == counted(prompt, 3) for request in requests)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_the_work_of_one_that_is_aborted_half_way_goes_on(num_steps, chunk_size) -> None:
    fake = FakeEngine(max_num_batched_tokens=24, chunk_size=chunk_size)
    prompt = _prompt(130)
    first, *others = [fake.add(prompt, max_tokens=3) for _ in range(5)]
    for _ in range(num_steps):
        fake.engine.step()
    fake.engine.abort([first])
    fake.run()
    # A piece that was in flight may have been written into a chunk that went with its writer.
    assert fake.engine.stats.num_prompt_tokens_computed <= 130 + 4 + 24
    assert all(tokens_of(request) == counted(prompt, 3) for request in others)
    fake.engine.check_accounts()


def test_prompts_that_only_begin_alike_are_computed_in_part() -> None:
    fake = FakeEngine()
    for i in range(5):
        fake.add([*_prompt(64), 500 + i, 600], max_tokens=2)
    fake.run()
    assert fake.engine.stats.num_prompt_tokens_computed == 64 + 5 * 2


def test_one_namespace_does_not_wait_for_another() -> None:
    fake = FakeEngine()
    for salt in ("a", "b"):
        fake.add(_prompt(70), max_tokens=2, cache_salt=salt)
    fake.run()
    assert fake.runner.steps[0] == [70, 70]


def test_without_sharing_all_are_computed_at_once() -> None:
    fake = FakeEngine(sharing=False)
    for _ in range(3):
        fake.add(_prompt(70), max_tokens=2)
    fake.run()
    assert fake.runner.steps == [[70, 70, 70], [1, 1, 1]]
