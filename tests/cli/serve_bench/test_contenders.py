"""The engine as a contender, in a time in which every step takes one second."""

from types import SimpleNamespace

import pytest
import torch

from chunkcache.cli.serve_bench.clock import VirtualClock
from chunkcache.cli.serve_bench.contenders import EngineContender, ServerLimits
from chunkcache.cli.serve_bench.transformers_batching import ContinuousBatching, bytes_in_use
from chunkcache.cli.serve_bench.watch import OverLimitError, Watcher
from chunkcache.cli.serve_bench.workload import TimedRequest
from chunkcache_testing.tiny_models import CONFIGS, make_model

LIMITS = ServerLimits(max_num_seqs=4, max_num_batched_tokens=64, chunk_size=16, capacity=64)
PROMPT = list(range(48))


@pytest.fixture(scope="module")
def model():
    return make_model(CONFIGS["llama"]())


def engine(model, *, sharing: bool = True) -> EngineContender:
    return EngineContender(model, LIMITS, VirtualClock(1.0), sharing=sharing)


def serve(contender, *requests: TimedRequest, **options):
    return contender.serve(requests, Watcher(requests, **options))


def test_a_lone_request_gets_a_token_each_step_from_its_arrival(model) -> None:
    run = serve(engine(model), TimedRequest(10.0, PROMPT, 4))
    assert run.requests[0].token_times == [11.0, 12.0, 13.0, 14.0]


def test_requests_apart_do_not_meet(model) -> None:
    run = serve(engine(model), TimedRequest(0.0, PROMPT, 3), TimedRequest(100.0, PROMPT, 3))
    assert run.requests[1].token_times == [101.0, 102.0, 103.0]
    assert run.peak_batch == 1


def test_requests_together_are_one_batch(model) -> None:
    run = serve(engine(model), *[TimedRequest(0.0, [i, *PROMPT[:15]], 5) for i in range(3)])
    assert run.peak_batch == 3


def test_a_request_that_comes_during_a_step_waits_from_its_arrival(model) -> None:
    run = serve(engine(model), TimedRequest(0.0, PROMPT, 6), TimedRequest(0.5, PROMPT, 2))
    assert run.requests[1].arrival == 0.5
    assert run.requests[1].token_times[0] >= 2.0


def test_a_shared_prompt_is_computed_and_held_once(model) -> None:
    requests = [TimedRequest(2.0 * i, PROMPT, 16) for i in range(4)]
    on, off = (serve(engine(model, sharing=sharing), *requests) for sharing in (True, False))
    # All but the last token of each further prompt is there.
    assert on.num_prompt_tokens_computed == 48 + 3
    assert off.num_prompt_tokens_computed == 4 * 48
    assert on.peak_kv_bytes < off.peak_kv_bytes


def test_nothing_is_left_from_the_run_before(model) -> None:
    contender = engine(model)
    first = serve(contender, TimedRequest(0.0, PROMPT, 4))
    assert serve(contender, TimedRequest(0.0, PROMPT, 4)) == first


def test_a_run_over_the_limit_is_stopped_and_the_next_one_is_whole(model) -> None:
    contender = engine(model)
    requests = [TimedRequest(0.0, [i, *PROMPT], 8) for i in range(4)]
    with pytest.raises(OverLimitError):
        serve(contender, *requests, limit_ms=500)
    assert [len(r.token_times) for r in serve(contender, *requests).requests] == [8] * 4


def test_margins_belong_to_the_tokens_that_are_generated(model) -> None:
    requests = [TimedRequest(0.0, PROMPT, 6), TimedRequest(0.0, PROMPT[7:], 3)]
    contender = engine(model)
    with_margins = contender.generate_with_margins(requests)
    assert [[token for token, _ in tokens] for tokens in with_margins] == contender.generate(
        requests
    )
    assert all(margin > 0 for tokens in with_margins for _, margin in tokens)


def test_transformers_gives_every_token_and_the_same_ones(model) -> None:
    requests = [TimedRequest(0.0, PROMPT, 6), TimedRequest(0.01, PROMPT[7:], 3)]
    contender = ContinuousBatching(model, LIMITS)
    assert contender.generate(requests) == engine(model).generate(requests)
    run = serve(contender, *requests)
    assert [len(request.token_times) for request in run.requests] == [6, 3]
    for request in run.requests:
        assert sorted(request.token_times) == request.token_times
        assert request.token_times[0] > request.arrival


def test_transformers_peaks_are_those_of_its_pool(model) -> None:
    run = serve(ContinuousBatching(model, LIMITS), TimedRequest(0.0, PROMPT, 6))
    chunk_bytes = 2 * 3 * 2 * 16 * 16 * 4  # K and V, layers, heads, tokens, head_dim, float32
    assert (run.peak_batch, run.peak_kv_bytes) == (1, 4 * chunk_bytes)


def test_blocks_in_use_are_counted_in_a_cache_of_earlier_transformers() -> None:
    # Ten blocks of 64 bytes, and two for padding; keys and values of two layers.
    layers = [torch.zeros(12, 16, dtype=torch.float32) for _ in range(2)]
    cache = SimpleNamespace(
        key_cache=layers, value_cache=layers, num_blocks=10, get_num_free_blocks=lambda: 7
    )
    assert bytes_in_use(cache) == 3 * 4 * 64


def test_a_closed_engine_is_made_again_when_it_is_needed(model) -> None:
    contender = engine(model)
    request = TimedRequest(0.0, PROMPT, 4)
    first = serve(contender, request)
    contender.close()
    assert serve(contender, request) == first
