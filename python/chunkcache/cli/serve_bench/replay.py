"""Makes a workload of a recorded trace: its times at another speed, its lengths at another scale.

A trace with hash ids says which blocks of its prompts are equal, but not their tokens; these are
made from the ids, so that equal ids give equal tokens and different ids give different ones. A
trace of lengths alone gets random prompts, which share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from chunkcache.cli.serve_bench.traces import MOONCAKE_BLOCK, TraceEntry
from chunkcache.cli.serve_bench.workload import TimedRequest
from chunkcache.errors import InvalidConfigError

# Tokens at a block's begin that spell its hash id; four digits in base 49,152 hold 2**62 ids.
_NUM_DIGITS = 4


def replayed(
    entries: Sequence[TraceEntry],
    *,
    speed: float,
    scale: float,
    vocab_size: int,
    max_model_len: int | None,
    seed: int,
) -> list[TimedRequest]:
    """Return the requests of a trace, the first one at 0.

    Args:
        entries: by time.
        speed: the trace's seconds in one second of the workload.
        scale: factor of all lengths, blocks included. Recorded prompts keep their beginning.
        vocab_size: of the model.
        max_model_len: most tokens that the model takes; None for no limit.
        seed: of the tokens that are made.

    Raises:
        InvalidConfigError: a request does not fit the model; the message names its line.
    """
    if scale > 1 and any(entry.token_ids for entry in entries):
        raise InvalidConfigError(
            f"scale is {scale:g}; allowed for a trace of token ids is at most 1"
        )
    begin = entries[0].seconds
    requests = []
    for entry in entries:
        num_prompt = _scaled(entry.num_input_tokens, scale)
        num_output = _scaled(entry.num_output_tokens, scale)
        if max_model_len is not None and num_prompt + num_output > max_model_len:
            raise InvalidConfigError(
                f"line {entry.line} of the trace has {num_prompt} + {num_output} tokens at scale "
                f"{scale:g}; allowed for the model is {max_model_len}: choose a smaller scale"
            )
        prompt = _prompt(entry, num_prompt, scale, vocab_size, seed)
        requests.append(TimedRequest((entry.seconds - begin) / speed, prompt, num_output))
    return requests


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))


def _prompt(
    entry: TraceEntry, num_tokens: int, scale: float, vocab_size: int, seed: int
) -> list[int]:
    if entry.token_ids:
        head = list(entry.token_ids[:num_tokens])
        for token in head:
            if token >= vocab_size:
                raise InvalidConfigError(
                    f"line {entry.line} of the trace has the token id {token} in input_ids; "
                    f"allowed for the model is below {vocab_size}"
                )
        return head
    if not entry.hash_ids:
        generator = np.random.default_rng([seed, entry.line])
        return [int(token) for token in generator.integers(vocab_size, size=num_tokens)]
    prompt: list[int] = []
    for index, hash_id in enumerate(entry.hash_ids):
        # Blocks of a scaled length need not be whole: each takes what lies between its borders.
        is_last = index == len(entry.hash_ids) - 1
        border = round((index + 1) * MOONCAKE_BLOCK * scale)
        end = num_tokens if is_last else min(num_tokens, border)
        prompt.extend(block_tokens(hash_id, end - len(prompt), vocab_size, seed).tolist())
    return prompt


def block_tokens(
    hash_id: int, num_tokens: int, vocab_size: int, seed: int
) -> npt.NDArray[np.int64]:
    """Return the first tokens of the block ``hash_id``.

    They begin with the digits of the id in base ``vocab_size``, the lowest first: no two blocks
    are equal, as far as their length allows. What follows is random.
    """
    tokens = np.random.default_rng([seed, hash_id]).integers(vocab_size, size=num_tokens)
    for index in range(min(num_tokens, _NUM_DIGITS)):
        hash_id, tokens[index] = divmod(hash_id, vocab_size)
    return tokens
