"""Traces made into workloads."""

import json
from pathlib import Path

import pytest

from chunkcache.cli.serve_bench.replay import block_tokens, replayed
from chunkcache.cli.serve_bench.traces import TraceEntry, read_trace
from chunkcache.errors import InvalidConfigError

VOCAB_SIZE = 1000


def replay(*entries: TraceEntry, speed=1.0, scale=1.0, max_model_len=None, vocab_size=VOCAB_SIZE):
    return replayed(
        entries,
        speed=speed,
        scale=scale,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        seed=0,
    )


def blocks(line: int, num_tokens: int, *hash_ids: int, seconds: float = 0.0) -> TraceEntry:
    return TraceEntry(line, seconds, num_tokens, 10, hash_ids=hash_ids)


def num_common(a: list[int], b: list[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def test_the_first_request_comes_at_zero_and_speed_divides_the_rest() -> None:
    entries = [TraceEntry(i, seconds, 5, 5) for i, seconds in enumerate((10.0, 14.0, 20.0))]
    assert [request.arrival for request in replay(*entries, speed=4.0)] == [0.0, 1.0, 2.5]


def test_lengths_are_scaled() -> None:
    (request,) = replay(TraceEntry(1, 0.0, 1000, 100), scale=0.05)
    assert (len(request.prompt), request.num_output_tokens) == (50, 5)


@pytest.mark.parametrize("scale", [1e-6, 0.001, 0.01, 0.1, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("num_tokens", [1, 511, 512, 513, 5000])
def test_hashed_prompts_have_their_scaled_length(scale: float, num_tokens: int) -> None:
    entry = blocks(1, num_tokens, *range(-(-num_tokens // 512)))
    (request,) = replay(entry, scale=scale)
    assert len(request.prompt) == max(1, round(num_tokens * scale))


def test_equal_leading_hash_ids_give_equal_tokens() -> None:
    one, other = replay(blocks(1, 1500, 1, 2, 3), blocks(2, 1500, 1, 2, 4))
    assert num_common(one.prompt, other.prompt) == 1024


def test_scaled_blocks_are_shared_up_to_the_scaled_border() -> None:
    one, other = replay(blocks(1, 1500, 1, 2, 3), blocks(2, 1500, 1, 2, 4), scale=0.1)
    assert num_common(one.prompt, other.prompt) == 102


def test_a_partial_block_is_the_beginning_of_the_whole_one() -> None:
    one, other = replay(blocks(1, 700, 1, 2), blocks(2, 1024, 1, 2))
    assert other.prompt[:700] == one.prompt


@pytest.mark.parametrize("num_tokens", [2, 3, 8])
def test_different_hash_ids_give_different_tokens(num_tokens: int) -> None:
    ids = [*range(300), *range(0, 10**4, 97)]
    made = {tuple(block_tokens(i, num_tokens, 100, 0)) for i in set(ids)}
    assert len(made) == len(set(ids))


def test_huge_hash_ids_are_taken() -> None:
    assert len(block_tokens(2**80, 8, VOCAB_SIZE, 0)) == 8


def test_recorded_tokens_are_kept() -> None:
    (request,) = replay(TraceEntry(1, 0.0, 4, 2, token_ids=(9, 8, 7, 6)))
    assert request.prompt == [9, 8, 7, 6]


def test_recorded_tokens_keep_their_beginning_when_scaled() -> None:
    (request,) = replay(TraceEntry(1, 0.0, 4, 2, token_ids=(9, 8, 7, 6)), scale=0.5)
    assert request.prompt == [9, 8]


def test_recorded_tokens_cannot_be_made_longer() -> None:
    with pytest.raises(InvalidConfigError, match="scale is 2"):
        replay(TraceEntry(1, 0.0, 2, 2, token_ids=(9, 8)), scale=2.0)


def test_a_token_that_the_model_lacks_is_refused_with_its_line() -> None:
    with pytest.raises(InvalidConfigError, match=r"line 7 .* 5000 in input_ids"):
        replay(TraceEntry(7, 0.0, 2, 2, token_ids=(9, 5000)))


def test_a_request_longer_than_the_model_is_refused_with_its_line() -> None:
    with pytest.raises(InvalidConfigError, match=r"line 3 .* 90 \+ 20 .* 100"):
        replay(TraceEntry(3, 0.0, 90, 20), max_model_len=100)


def test_prompts_of_lengths_alone_share_nothing() -> None:
    one, other = replay(TraceEntry(1, 0.0, 50, 2), TraceEntry(2, 0.0, 50, 2))
    assert one.prompt != other.prompt


def test_equal_calls_give_equal_workloads() -> None:
    entries = (TraceEntry(1, 0.0, 50, 2), blocks(2, 700, 1, 2))
    assert replay(*entries) == replay(*entries)


def test_the_tokens_of_a_mooncake_trace_hit_as_its_blocks_do(shared_data: Path) -> None:
    from chunkcache import PrefixTree

    path = shared_data / "traces" / "mooncake_conversation_trace.jsonl"
    _, entries = read_trace(path, max_requests=300)
    # One chunk to a block: 16 tokens instead of 512.
    requests = replay(*entries, scale=16 / 512, vocab_size=49152)
    trees = PrefixTree(2**20, chunk_size=16), PrefixTree(2**20, chunk_size=1)
    lines = path.read_text().splitlines()
    for entry, request in zip(entries, requests, strict=True):
        whole = json.loads(lines[entry.line - 1])["hash_ids"][: len(request.prompt) // 16]
        matched = []
        for tree, tokens in zip(trees, (request.prompt, whole), strict=True):
            if tokens:
                inserted = tree.insert(tokens)
                tree.commit([inserted.seq], [len(tokens) - inserted.num_computed_tokens])
                tree.remove(inserted.seq)
                matched.append(inserted.num_matched_tokens // tree.chunk_size)
        assert len(set(matched)) <= 1
