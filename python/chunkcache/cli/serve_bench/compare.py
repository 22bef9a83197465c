"""Whether contenders say the same, before their times are compared.

Floating point makes a greedy text depend on the shapes that were multiplied, so texts are compared
up to the first position where the two best logits are closer than `CLOSE_LOGITS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunkcache.errors import ChunkCacheError

#: Of float32 logits; in other dtypes a tie cannot be told from a fault this way.
CLOSE_LOGITS = 1e-4


@dataclass(frozen=True)
class Comparison:
    """How far the outputs of a contender agree with the reference.

    Attributes:
        num_compared: tokens up to the first close pair of logits of each request.
        num_equal: those of them before the first difference of each request.
        num_tokens: tokens of all requests together.
    """

    num_compared: int
    num_equal: int
    num_tokens: int

    @property
    def equal(self) -> bool:
        """Whether nothing differs that can be compared."""
        return self.num_equal == self.num_compared


def compare_outputs(
    reference: Sequence[Sequence[tuple[int, float]]], outputs: Sequence[Sequence[int]]
) -> Comparison:
    """Compare greedy outputs.

    Args:
        reference: for each request its tokens, each with how far its logit is above the second.
        outputs: for each request the tokens that another server gave.

    Raises:
        ChunkCacheError: an output has another length than the reference.
    """
    num_compared = num_equal = 0
    for index, (expected, tokens) in enumerate(zip(reference, outputs, strict=True)):
        if len(expected) != len(tokens):
            raise ChunkCacheError(
                f"request {index} of the sample has {len(tokens)} tokens instead of {len(expected)}"
            )
        clear = next(
            (i for i, (_, margin) in enumerate(expected) if margin < CLOSE_LOGITS), len(expected)
        )
        pairs = zip(expected[:clear], tokens, strict=False)
        num_compared += clear
        num_equal += next((i for i, ((a, _), b) in enumerate(pairs) if a != b), clear)
    return Comparison(num_compared, num_equal, sum(map(len, reference)))
