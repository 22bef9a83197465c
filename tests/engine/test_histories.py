"""Random histories of requests, aborts, pins and evictions, over a pool of any size."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from chunkcache import OutOfChunksError
from chunkcache_testing.fake_engine import FakeEngine, counted, tokens_of

MAX_STEPS = 5000

_limits = st.fixed_dictionaries(
    {
        "capacity": st.integers(2, 40),
        "max_num_seqs": st.integers(1, 8),
        "overlap": st.booleans(),
        "sharing": st.booleans(),
    }
)
_requests = st.fixed_dictionaries(
    {
        "begin": st.integers(0, 2),
        "length": st.integers(1, 90),
        "max_tokens": st.integers(1, 40),
        "n": st.integers(1, 3),
        "priority": st.integers(-1, 2),
        "cache_salt": st.sampled_from(["", "a"]),
        "eos_token_ids": st.sampled_from([(), (60,)]),
    }
)
_events = st.one_of(
    st.tuples(st.just("add"), _requests),
    st.tuples(st.just("step"), st.integers(1, 8)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("evict"), st.integers(1, 20)),
)


@given(
    limits=_limits,
    budget=st.integers(8, 60),
    chunked=st.booleans(),
    events=st.lists(_events, max_size=40),
)
def test_every_request_gets_its_tokens_or_is_refused_and_nothing_is_lost(
    limits: dict[str, Any], budget: int, chunked: bool, events: list[Any]
) -> None:
    if not chunked:
        budget += 130
    fake = FakeEngine(**limits, max_num_batched_tokens=budget, chunked_prefill=chunked)
    requests, aborted = [], set()
    for event, argument in events:
        if event == "add":
            options = dict(argument)
            prompt = [options.pop("begin"), *range(1, options.pop("length"))]
            requests.append(fake.add(prompt, **options))
        elif event == "step":
            for _ in range(argument):
                fake.engine.step()
        elif event == "abort" and requests:
            request = requests[argument % len(requests)]
            fake.engine.abort([request])
            aborted.add(request)
        elif event == "evict":
            fake.cache.evict(argument)
        fake.cache.check_invariants()
    fake.run(MAX_STEPS)
    fake.engine.check_accounts()
    assert max(map(sum, fake.runner.steps), default=0) <= budget
    assert max(map(len, fake.runner.steps), default=0) <= limits["max_num_seqs"]
    for request in requests:
        if request.error is not None:
            needed = request.num_prompt_tokens + request.max_tokens - 1
            assert isinstance(request.error, OutOfChunksError)
            assert needed > 16 * limits["capacity"]
        elif request not in aborted:
            _check_tokens(request)


def _check_tokens(request) -> None:
    expected = counted(request.prompt_token_ids, request.max_tokens)
    for end in request.eos_token_ids:
        if end in expected:
            expected = expected[: expected.index(end) + 1]
    assert [sample.token_ids for sample in request.output.outputs] == (
        [expected] * request.params.n
    )
    assert tokens_of(request) == expected
