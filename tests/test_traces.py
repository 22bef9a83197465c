"""Recorded traces: what is found is what other implementations and a count by hand have found."""

import json
from pathlib import Path

import numpy as np
import pytest

from chunkcache import PrefixTree

BLOCK = 512  # tokens of one Mooncake block


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def visit(tree: PrefixTree, tokens: np.ndarray) -> int:
    """Insert a prompt, write all of it, remove it; returns how many tokens were matched."""
    inserted = tree.insert(tokens)
    tree.commit([inserted.seq], [len(tokens) - inserted.num_computed_tokens])
    tree.remove(inserted.seq)
    return inserted.num_matched_tokens


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_the_agent_trace_matches_as_another_cache_did(shared_data: Path, chunk_size: int) -> None:
    traces = shared_data / "traces"
    golden = json.loads((traces / f"golden_match_miniswe_p{chunk_size}.json").read_text())
    tree = PrefixTree(2**20, chunk_size=chunk_size)
    matched = []
    for request in lines(traces / "agent_miniswe_smollm2_tokens.jsonl"):
        prompt = np.array(request["input_ids"], dtype=np.int32)
        matched.append(tree.match_prefix(prompt).num_tokens)
        # The K/V of the last token of an answer is never computed.
        visit(tree, np.concatenate([prompt, request["output_ids"][:-1]]).astype(np.int32))
    assert matched == golden["matched"]
    tree.check_invariants()


def hits(requests: list[dict], capacity: int) -> tuple[float, float, float]:
    """Shares of tokens and of blocks that hit, and the mean of the requests' block shares."""
    tree = PrefixTree(capacity, chunk_size=1)
    blocks = [np.array(request["hash_ids"], dtype=np.uint32) for request in requests]
    matched = np.array([visit(tree, ids) for ids in blocks])
    tree.check_invariants()
    tokens = np.array([request["input_length"] for request in requests])
    counts = np.array([len(ids) for ids in blocks])
    hit_tokens = np.minimum(matched * BLOCK, tokens)
    return (
        float(hit_tokens.sum() / tokens.sum()),
        float(matched.sum() / counts.sum()),
        float((matched / counts).mean()),
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conversation", (0.3736, 0.3664, 0.38425808746)),
        ("synthetic", (0.6512, 0.6396, 0.42323532378)),
    ],
)
def test_without_eviction_the_mooncake_traces_hit_exactly(
    shared_data: Path, name: str, expected: tuple
) -> None:
    requests = lines(shared_data / "traces" / f"mooncake_{name}_trace.jsonl")
    tokens, blocks, mean = hits(requests, 2**20)
    assert (round(tokens, 4), round(blocks, 4)) == expected[:2]
    assert mean == pytest.approx(expected[2], abs=5e-12)


@pytest.mark.parametrize(
    ("name", "capacity", "percent"),
    [
        ("conversation", 1_000, 4.5),
        ("conversation", 5_000, 11.4),
        ("conversation", 20_000, 29.4),
        ("conversation", 100_000, 37.1),
        ("synthetic", 1_000, 8.6),
        ("synthetic", 5_000, 28.5),
        ("synthetic", 20_000, 58.2),
        ("synthetic", 100_000, 65.1),
    ],
)
def test_eviction_loses_no_more_than_plain_lru(
    shared_data: Path, name: str, capacity: int, percent: float
) -> None:
    requests = lines(shared_data / "traces" / f"mooncake_{name}_trace.jsonl")
    assert 100 * hits(requests, capacity)[0] >= percent - 0.5
