"""Every argument of every public function, given what it may not be.

Each call gets one wrong argument out of a list of wrong ones, and must answer with an error of the
package that names the argument, says what was given and what is allowed; nothing may have changed.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from chunkcache import ChunkCache, ChunkCacheError, PrefixTree, attention, reference

#: Wrong for whatever takes an integer.
NO_INTEGERS: dict[str, Any] = {
    "None": None,
    "list": [],
    "dict": {1: 2},
    "set": {1, 2},
    "str": "x",
    "bytes": b"ab",
    "float": 1.5,
    "nan": math.nan,
    "bool": True,
    "object": object(),
    "array": np.zeros(2),
    "complex": 1j,
}
NEGATIVE = {"-2": -2, "-2**70": -(2**70)}
HUGE = {"2**64": 2**64, "2**70": 2**70, "10**5000": 10**5000}
INTEGER = {**NO_INTEGERS, **NEGATIVE, **HUGE}
COUNT = {**INTEGER, "0": 0}
#: Wrong for whatever takes a sequence of integers.
INTEGERS: dict[str, Any] = {
    "None": None,
    "int": 7,
    "dict": {1: 2},
    "set": {1, 2},
    "frozenset": frozenset({1}),
    "str": "x",
    "bytes": b"ab",
    "bytearray": bytearray(b"ab"),
    "float": 1.5,
    "object": object(),
    "list of None": [None],
    "list of -1": [-1],
    "list of 2**64": [2**64],
    "list of str": ["a"],
    "list of bool": [True],
    "list of float": [1.0],
    "float64": np.zeros(2),
    "int16 -5": np.array([-5], np.int16),
    "uint64": np.array([2**64 - 1], np.uint64),
    "bfloat16": torch.zeros(2, dtype=torch.bfloat16),
    "meta": torch.zeros(2, dtype=torch.int64, device="meta"),
    "structured": np.zeros(2, dtype="i4,i4"),
}
#: A handle may be any number of 64 bits; one that was not given out is unknown.
HANDLES = {key: wrong for key, wrong in INTEGERS.items() if key != "uint64"}
#: Wrong for whatever takes an array of floats.
ARRAY: dict[str, Any] = {
    **NO_INTEGERS,
    "nested list": [[[0.0] * 8] * 2],
    "float64": np.zeros((1, 2, 8)),
    "dimensions": np.zeros((2, 8), np.float32),
    "int64": torch.zeros((1, 2, 8), dtype=torch.int64),
    "meta": torch.zeros((1, 2, 8), device="meta"),
    "sparse": torch.zeros((1, 2, 8)).to_sparse(),
}
NUMBER = {**NO_INTEGERS, "inf": math.inf, "-inf": -math.inf}
for _right in ("None", "float"):
    del NUMBER[_right]
CHOICE = {**NO_INTEGERS, "-1": -1, "huge": 10**5000}
FLAG = {key: wrong for key, wrong in INTEGER.items() if key != "bool"}
OPTIONAL = {key: wrong for key, wrong in COUNT.items() if key != "None"}


def tree_state() -> tuple[PrefixTree, dict[str, Any]]:
    tree = PrefixTree(64, chunk_size=4)
    written, fresh = tree.insert(range(6)).seq, tree.insert([9, 9]).seq
    tree.commit([written], [6])
    return tree, {"written": written, "fresh": fresh}


TREE_CALLS: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "match_prefix": {"tokens": ([1], INTEGERS), "cache_salt": ("", CHOICE)},
    "insert": {"tokens": ([1], INTEGERS), "cache_salt": ("", CHOICE)},
    "append": {"seq": ("fresh", INTEGER), "tokens": ([1], INTEGERS)},
    "append_batch": {"seqs": (["fresh"], HANDLES), "tokens": ([1], INTEGERS)},
    "reserve": {"seqs": (["fresh"], HANDLES)},
    "cancel_reserved": {"seq": ("fresh", INTEGER)},
    "fork": {"seq": ("fresh", INTEGER)},
    "truncate": {"seq": ("written", INTEGER), "num_tokens": (1, COUNT)},
    "rewind": {"seq": ("written", INTEGER), "num_computed_tokens": (1, INTEGER)},
    "remove": {"seq": ("fresh", INTEGER)},
    "commit": {"seqs": (["fresh"], HANDLES), "num_tokens": ([1], INTEGERS)},
    "plan": {"batch": (["fresh"], HANDLES), "qo_indptr": ([0, 1], INTEGERS)},
    "pin": {
        "tokens": (range(6), INTEGERS),
        "cache_salt": ("", CHOICE),
        "ttl": (1.0, {**NUMBER, "-1": -1.0}),
    },
    "unpin": {"pin": (0, INTEGER)},
    "evict": {"num_chunks": (1, INTEGER)},
    "sequence": {"seq": ("fresh", INTEGER)},
    "tokens": {"seq": ("fresh", INTEGER)},
}
#: Right after all, though it stands among what is wrong elsewhere.
RIGHT = {
    ("match_prefix", "cache_salt", "str"),
    ("insert", "cache_salt", "str"),
    ("append", "tokens", "int"),
    ("plan", "batch", "list of None"),
    ("plan", "qo_indptr", "None"),
    ("pin", "cache_salt", "str"),
    ("pin", "ttl", "None"),
}


def refused(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(ChunkCacheError) as caught:
        call()
    message = str(caught.value)
    assert message.startswith(name), message
    assert ": got " in message, message
    assert "allowed is" in message, message


@pytest.mark.parametrize(
    ("operation", "name", "wrong"),
    [
        pytest.param(operation, name, wrong, id=f"{operation}-{name}-{key}")
        for operation, arguments in TREE_CALLS.items()
        for name, (_, wrongs) in arguments.items()
        for key, wrong in wrongs.items()
        if (operation, name, key) not in RIGHT
    ],
)
def test_operations_of_a_tree(operation: str, name: str, wrong: Any) -> None:
    tree, handles = tree_state()

    def right(value: Any) -> Any:
        if isinstance(value, list):
            return [handles.get(item, item) for item in value]
        return handles[value] if isinstance(value, str) and value in handles else value

    arguments = {key: right(value) for key, (value, _) in TREE_CALLS[operation].items()}
    before = tree.render(), str(tree.stats())
    refused(lambda: getattr(tree, operation)(**{**arguments, name: wrong}), name)
    assert (tree.render(), str(tree.stats())) == before
    tree.check_invariants()


SIZES: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 8, "chunk_size": 16}
MAKING: dict[str, dict[str, Any]] = {
    "num_layers": COUNT,
    "num_kv_heads": COUNT,
    "head_dim": COUNT,
    "chunk_size": COUNT,
    "capacity": OPTIONAL,
    "num_threads": OPTIONAL,
    "enable_prefix_sharing": FLAG,
    "dtype": {**CHOICE, "float": float, "int": int, "structure": [("a", "f4")]},
    "device": CHOICE,
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        pytest.param(name, wrong, id=f"{name}-{key}")
        for name, wrongs in MAKING.items()
        for key, wrong in wrongs.items()
    ],
)
def test_making_a_cache(name: str, wrong: Any) -> None:
    refused(lambda: ChunkCache(**{**SIZES, "capacity": 4, name: wrong}), name)


@pytest.mark.parametrize("wrong", OPTIONAL.values(), ids=OPTIONAL)
def test_making_a_cache_of_bytes(wrong: Any) -> None:
    refused(lambda: ChunkCache(**SIZES, capacity_bytes=wrong), "capacity_bytes")


@pytest.mark.parametrize("name", ["capacity", "chunk_size"])
@pytest.mark.parametrize("wrong", COUNT.values(), ids=COUNT)
def test_making_a_tree(name: str, wrong: Any) -> None:
    refused(lambda: PrefixTree(**{"capacity": 8, name: wrong}), name)


OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sm_scale": (1.0, {**NUMBER, "above float32": 1e300}),
    "logits_soft_cap": (1.0, {**NUMBER, "-1": -1, "1e300": 1e300, "1e-300": 1e-300}),
    "window_left": (-1, {**INTEGER, "2**31": 2**31}),
    "sharing": ("auto", CHOICE),
    "isa": (None, {key: wrong for key, wrong in CHOICE.items() if key != "None"}),
    "return_lse": (False, FLAG),
}
OUTPUTS = {
    name: (None, {key: wrong for key, wrong in ARRAY.items() if key != "None"})
    for name in ("out", "lse")
}
ROWS = np.ones((1, 2, 8), np.float32)
CACHE_CALLS: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "write_kv": {
        "layer": (0, {**INTEGER, "1": 1}),
        "k": (ROWS, ARRAY),
        "v": (ROWS, ARRAY),
        "plan": ("plan", ARRAY),
    },
    "read_kv": {
        "layer": (0, {**INTEGER, "1": 1}),
        "seq": ("seq", INTEGER),
        "begin": (0, INTEGER),
        "end": (1, INTEGER),
    },
    "attend": {
        "layer": (0, {**INTEGER, "1": 1}),
        "q": (ROWS, ARRAY),
        "plan": ("plan", ARRAY),
        **OUTPUTS,
        **OPTIONS,
    },
    "commit": {"plan": ("plan", ARRAY)},
}


def wrong_calls(calls: dict[str, dict[str, tuple[Any, dict[str, Any]]]]) -> list[Any]:
    return [
        pytest.param(operation, name, wrong, id=f"{operation}-{name}-{key}")
        for operation, arguments in calls.items()
        for name, (_, wrongs) in arguments.items()
        for key, wrong in wrongs.items()
    ]


@pytest.mark.parametrize(("operation", "name", "wrong"), wrong_calls(CACHE_CALLS))
def test_operations_of_a_cache(operation: str, name: str, wrong: Any) -> None:
    cache = ChunkCache(**SIZES, capacity=4)
    seq = cache.insert([1]).seq
    with cache.plan([seq]) as plan:
        cache.write_kv(0, ROWS, ROWS, plan)
        arguments = {key: value for key, (value, _) in CACHE_CALLS[operation].items()}
        arguments.update({key: plan for key in arguments if key == "plan"})
        arguments.update({key: seq for key in arguments if key == "seq"})
        refused(lambda: getattr(cache, operation)(**{**arguments, name: wrong}), name)
        assert plan.is_open
        cache.commit(plan)


STATE = np.ones((1, 2), np.float32)
PAGES = np.ones((1, 16, 2, 8), np.float32)
THREADS = {"num_threads": (1, OPTIONAL)}
LSE: dict[str, Any] = {**ARRAY, "dimensions": np.zeros((1, 2, 8, 1), np.float32)}
ATTENTION_CALLS: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "plan_from_block_tables": {
        "block_table": ([[0]], {**INTEGERS, "list of list of -1": [[-1]], "ragged": [[0], [0, 1]]}),
        "seq_lens": ([3], {**INTEGERS, "2**31": [2**31]}),
        "page_size": (16, {**COUNT, "2**32 - 1": 2**32 - 1}),
        "qo_indptr": ([0, 1], {key: wrong for key, wrong in INTEGERS.items() if key != "None"}),
    },
    "plan_from_csr": {
        "kv_indptr": ([0, 1], INTEGERS),
        "kv_indices": ([0], INTEGERS),
        "kv_last_page_len": ([3], INTEGERS),
        "page_size": (16, {**COUNT, "2**32 - 1": 2**32 - 1}),
        "qo_indptr": ([0, 1], {key: wrong for key, wrong in INTEGERS.items() if key != "None"}),
    },
    "run": {
        "plan": ("plan", ARRAY),
        "q": (ROWS, ARRAY),
        "k_pages": (PAGES, ARRAY),
        "v_pages": (PAGES, {key: wrong for key, wrong in ARRAY.items() if key != "None"}),
        "kv_layout": ("NHD", CHOICE),
        **OUTPUTS,
        **OPTIONS,
        **THREADS,
    },
    "partial_attention": {
        "q": (ROWS, ARRAY),
        "k": (ROWS, ARRAY),
        "v": (ROWS.copy(), ARRAY),
        **OUTPUTS,
        **{name: OPTIONS[name] for name in ("sm_scale", "logits_soft_cap", "isa")},
        **THREADS,
    },
    "merge_state": {
        **dict.fromkeys(("o_a", "o_b"), (ROWS, ARRAY)),
        **dict.fromkeys(("lse_a", "lse_b"), (STATE, LSE)),
    },
    "merge_states": {"o": (ROWS[None], ARRAY), "lse": (STATE[None], ARRAY)},
    "lse_to_base2": {
        "lse": (STATE, {k: w for k, w in LSE.items() if k not in ("dimensions", "meta")})
    },
    "lse_from_base2": {
        "lse": (STATE, {k: w for k, w in LSE.items() if k not in ("dimensions", "meta")})
    },
    "lse_to_heads_first": {"lse": (STATE, LSE)},
    "lse_from_heads_first": {"lse": (STATE, LSE)},
}


@pytest.mark.parametrize(("function", "name", "wrong"), wrong_calls(ATTENTION_CALLS))
def test_functions_of_attention(function: str, name: str, wrong: Any) -> None:
    arguments = {key: value for key, (value, _) in ATTENTION_CALLS[function].items()}
    if "plan" in arguments:
        arguments["plan"] = attention.plan_from_block_tables([[0]], [3], 16)
    refused(lambda: getattr(attention, function)(**{**arguments, name: wrong}), name)


KEYS = np.ones((3, 2, 8))
#: The oracle takes any numbers.
NUMBERS = {
    key: wrong
    for key, wrong in ARRAY.items()
    if key not in ("nested list", "float64", "int64", "meta", "sparse")
}
ORACLE_OPTIONS = {
    "sm_scale": (1.0, NUMBER),
    "logits_soft_cap": (1.0, {**NUMBER, "-1": -1}),
}
POSITIONS = {key: wrong for key, wrong in INTEGERS.items() if key not in ("list of -1", "int16 -5")}
REFERENCE_CALLS: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "attention": {
        **{name: (value, NUMBERS) for name, value in (("q", ROWS), ("k", KEYS), ("v", KEYS))},
        "q_positions": ([2], {key: wrong for key, wrong in POSITIONS.items() if key != "None"}),
        "window_left": (-1, INTEGER),
        **ORACLE_OPTIONS,
    },
    "partial_attn": {
        **{name: (value, NUMBERS) for name, value in (("q", ROWS), ("k", KEYS), ("v", KEYS))},
        "visible": (None, {key: wrong for key, wrong in ARRAY.items() if key != "None"}),
        **ORACLE_OPTIONS,
    },
    "two_phase_attention": {
        "q": (ROWS, NUMBERS),
        "q_positions": ([2], POSITIONS),
        "shared": ([], {**NO_INTEGERS, "list": [1], "tuple": [(1, 2, 3)]}),
        "private": (
            [[reference.Chunk(KEYS, KEYS, 0)]],
            {**NO_INTEGERS, "inner": [3], "no chunk": [[3]]},
        ),
    },
    "merge_state": {
        **dict.fromkeys(("o_a", "o_b"), (ROWS, NUMBERS)),
        **{name: (STATE, {**NUMBERS, "dimensions": ROWS}) for name in ("lse_a", "lse_b")},
    },
    "visible_keys": {
        "q_positions": ([1], POSITIONS),
        "k_positions": ([1], POSITIONS),
        "window_left": (-1, INTEGER),
    },
    "empty_partial": dict.fromkeys(("rows", "num_qo_heads", "head_dim"), (1, INTEGER)),
}


@pytest.mark.parametrize(("function", "name", "wrong"), wrong_calls(REFERENCE_CALLS))
def test_functions_of_the_reference(function: str, name: str, wrong: Any) -> None:
    arguments = {key: value for key, (value, _) in REFERENCE_CALLS[function].items()}
    refused(lambda: getattr(reference, function)(**{**arguments, name: wrong}), name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: PrefixTree(8).insert(np.array([5, -7], np.int16)),
            "tokens[1]: got -7, allowed is an integer from 0 to 4294967295",
        ),
        (
            lambda: PrefixTree(8).insert(np.array([2**40], np.uint64)),
            "tokens[0]: got 1099511627776, allowed is an integer from 0 to 4294967295",
        ),
        (
            lambda: attention.plan_from_block_tables([[0, 1], [2, -3]], [17, 17], 16),
            "block_table[1, 1]: got -3, allowed is 0 to 4294967295",
        ),
        (
            lambda: attention.plan_from_block_tables(np.array([[2**64 - 1]], np.uint64), [3], 16),
            "block_table[0, 0]: got 18446744073709551615, allowed is an integer from 0 to"
            " 4294967295",
        ),
        (
            lambda: attention.plan_from_block_tables([[0]], [3], 2**32 - 1),
            "page_size: got 4294967295, allowed is an integer from 1 to 1048576",
        ),
        (
            lambda: ChunkCache(1, 2, 8, capacity=4, dtype=None),
            "dtype: got None, allowed is float32 or float16 or bfloat16 or, on a CUDA device,"
            " float8_e4m3fn",
        ),
        (
            lambda: ChunkCache(1, 2**40, 8, capacity=4),
            "num_kv_heads: got 1099511627776, allowed is an integer from 1 to 65536",
        ),
        (
            lambda: ChunkCache(2**16, 2**16, 2**16, capacity=2**20),
            "capacity: got 1048576, allowed is 1 to 63 chunks of 144115188075855872 bytes",
        ),
        (
            lambda: attention.partial_attention(ROWS, ROWS, ROWS.copy(), logits_soft_cap=math.inf),
            "logits_soft_cap: got inf, allowed is a finite float32 above 0, or 0 or None for no"
            " cap",
        ),
    ],
)
def test_a_message_gives_the_value_and_the_range(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ChunkCacheError) as caught:
        call()
    assert str(caught.value) == message


def test_an_entry_without_rows_is_a_fault_of_qo_indptr() -> None:
    tree, handles = tree_state()
    with pytest.raises(ChunkCacheError, match=r"^qo_indptr\[1\]: got 0 tokens for sequence"):
        tree.plan([handles["fresh"]], [0, 0])
