"""Outputs of contenders beside each other."""

import pytest

from chunkcache.cli.serve_bench.compare import Comparison, compare_outputs
from chunkcache.errors import ChunkCacheError

CLEAR, CLOSE = 1.0, 1e-5


def test_equal_outputs_are_equal() -> None:
    assert compare_outputs([[(1, CLEAR), (2, CLEAR)]], [[1, 2]]) == Comparison(2, 2, 2)


def test_a_difference_ends_the_equal_part() -> None:
    comparison = compare_outputs([[(1, CLEAR), (2, CLEAR), (3, CLEAR)]], [[1, 9, 3]])
    assert comparison == Comparison(3, 1, 3)
    assert not comparison.equal


def test_nothing_counts_from_a_close_pair_of_logits_on() -> None:
    comparison = compare_outputs([[(1, CLEAR), (2, CLOSE), (3, CLEAR)]], [[1, 9, 9]])
    assert comparison == Comparison(1, 1, 3)
    assert comparison.equal


def test_requests_add_up() -> None:
    reference = [[(1, CLEAR), (2, CLEAR)], [(1, CLEAR), (2, CLEAR)]]
    assert compare_outputs(reference, [[1, 2], [9, 2]]) == Comparison(4, 2, 4)


def test_an_answer_of_another_length_is_refused() -> None:
    with pytest.raises(ChunkCacheError, match=r"request 0 .* 1 tokens instead of 2"):
        compare_outputs([[(1, CLEAR), (2, CLEAR)]], [[1]])
