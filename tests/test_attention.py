"""Attention over pages that others lay out, and the partial states."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkcache import InvalidConfigError, PrefixTree, StalePlanError, attention, reference
from chunkcache_testing.prefix_kv import DTYPES, TOLERANCE

KERNELS = [
    {"isa": isa, "sharing": sharing}
    for isa, sharing in itertools.product(attention.available_isas(), ("auto", "always", "never"))
]


def rows(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape).astype(DTYPES[dtype])


class Paged:
    """A batch over shuffled pages: sequences 0 to 2 share two pages, 0 and 1 a third."""

    def __init__(self, rng: np.random.Generator, page_size: int, dtype: str = "float32") -> None:
        self.page_size = page_size
        self.tables = [[7, 2, 9, 4], [7, 2, 9], [7, 2, 5], [1], []]
        self.seq_lens = [
            3 * page_size + 5,
            3 * page_size,
            2 * page_size + 1,
            page_size - 1,
            0,
        ]
        self.k = rows(rng, 10, page_size, 2, 16, dtype=dtype)
        self.v = rows(rng, 10, page_size, 2, 16, dtype=dtype)
        # What is past the end of a sequence's last page must not be read.
        for pages, n in zip(self.tables, self.seq_lens, strict=True):
            if n % page_size:
                self.k[pages[-1], n % page_size :] = np.nan
                self.v[pages[-1], n % page_size :] = np.nan

    @property
    def block_table(self) -> np.ndarray:
        width = max(map(len, self.tables))
        return np.array([[*pages, *[-1] * (width - len(pages))] for pages in self.tables])

    @property
    def csr(self) -> tuple:
        indptr = np.cumsum([0, *map(len, self.tables)])
        last = [(n - 1) % self.page_size + 1 if n else 0 for n in self.seq_lens]
        return indptr, list(itertools.chain(*self.tables)), last

    def check(self, plan, q, out, lse, qo_lens, **options) -> None:
        begin = 0
        for pages, n, count in zip(self.tables, self.seq_lens, qo_lens, strict=True):
            k = self.k[pages].reshape(-1, 2, 16)[:n]
            v = self.v[pages].reshape(-1, 2, 16)[:n]
            span = slice(begin, begin + count)
            begin += count
            if n == 0:
                assert not out[span].any()
                assert np.all(lse[span] == -np.inf)
                continue
            expected, expected_lse = reference.attention(q[span], k, v, **options)
            assert reference.error(out[span], expected) <= 1e-5
            np.testing.assert_allclose(lse[span], expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["block table", "csr"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [16, 48, 256])
def test_run_over_pages(rng, page_size: int, kv_layout: str, form: str) -> None:
    paged = Paged(rng, page_size)
    if form == "csr":
        plan = attention.plan_from_csr(*paged.csr, page_size)
    else:
        plan = attention.plan_from_block_tables(paged.block_table, paged.seq_lens, page_size)
    k, v = paged.k, paged.v
    if kv_layout == "HND":
        k, v = (np.ascontiguousarray(part.swapaxes(1, 2)) for part in (k, v))
    q = rows(rng, 5, 6, 16)
    for kernel in KERNELS:
        out, lse = attention.run(plan, q, k, v, kv_layout=kv_layout, return_lse=True, **kernel)
        paged.check(plan, q, out, lse, [1] * 5)


def test_run_with_several_queries_a_sequence(rng) -> None:
    paged = Paged(rng, 16)
    qo_lens = [4, 20, 1, 15, 1]
    plan = attention.plan_from_block_tables(
        paged.block_table, paged.seq_lens, 16, np.cumsum([0, *qo_lens])
    )
    q = rows(rng, sum(qo_lens), 2, 16)
    options = {"window_left": 18, "logits_soft_cap": 2.0, "sm_scale": 0.5}
    out, lse = attention.run(plan, q, paged.k, paged.v, return_lse=True, **options)
    paged.check(plan, q, out, lse, qo_lens, **options)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_run_over_a_combined_array(rng, kv_layout: str) -> None:
    paged = Paged(rng, 16)
    combined = np.stack([paged.k, paged.v], axis=1)
    if kv_layout == "HND":
        combined = np.ascontiguousarray(combined.swapaxes(2, 3))
    plan = attention.plan_from_block_tables(paged.block_table, paged.seq_lens, 16)
    q = rows(rng, 5, 2, 16)
    out, lse = attention.run(plan, q, combined, kv_layout=kv_layout, return_lse=True)
    paged.check(plan, q, out, lse, [1] * 5)


def test_run_over_torch_tensors(rng) -> None:
    paged = Paged(rng, 16)
    plan = attention.plan_from_block_tables(
        torch.from_numpy(paged.block_table).int(), torch.tensor(paged.seq_lens), 16
    )
    q = rows(rng, 5, 2, 16)
    arrays = (torch.from_numpy(part) for part in (q, paged.k, paged.v))
    out, lse = attention.run(plan, *arrays, return_lse=True)
    paged.check(plan, q, out.numpy(), lse.numpy(), [1] * 5)


def test_run_over_the_plan_of_a_tree(rng) -> None:
    """Whoever keeps the K/V of a bare tree's chunks can attend with its plans."""
    tree = PrefixTree(8, chunk_size=16)
    tokens = range(40)
    seq = tree.insert(tokens).seq
    k, v = rows(rng, 40, 2, 16), rows(rng, 40, 2, 16)
    pages = np.zeros((2, 8 * 16, 2, 16), np.float32)
    q = rows(rng, 40, 2, 16)
    with tree.plan([seq], [0, 40]) as plan:
        pages[0, plan.slot_mapping], pages[1, plan.slot_mapping] = k, v
        k_pages, v_pages = pages.reshape(2, 8, 16, 2, 16)
        out = attention.run(plan, q, k_pages, v_pages)
        plan.commit()
    assert reference.error(out, reference.attention(q, k, v)[0]) <= 1e-5


def test_a_closed_plan_is_stale(rng) -> None:
    paged = Paged(rng, 16)
    plan = attention.plan_from_block_tables(paged.block_table, paged.seq_lens, 16)
    plan.close()
    with pytest.raises(StalePlanError):
        attention.run(plan, rows(rng, 5, 2, 16), paged.k, paged.v)


def test_a_plan_over_block_tables_cannot_be_committed() -> None:
    plan = attention.plan_from_block_tables([[0]], [3], 16)
    with pytest.raises(InvalidConfigError, match="plan: got a plan over block tables"):
        plan.commit()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"block_table": [[-1]]}, r"block_table\[0, 0\]"),
        ({"block_table": [0]}, "block_table"),
        ({"block_table": [[0.5]]}, "block_table"),
        ({"block_table": np.zeros((1, 0), int)}, "seq_lens|block_table"),
        ({"seq_lens": [17]}, "seq_lens|block_table"),
        ({"seq_lens": [-1]}, "seq_lens"),
        ({"seq_lens": [1, 2]}, "seq_lens|block_table"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": -1}, "page_size"),
        ({"qo_indptr": [0, 4]}, "qo_indptr"),
        ({"qo_indptr": [0]}, "qo_indptr"),
    ],
)
def test_tables_that_do_not_fit_are_refused_by_name(change, name) -> None:
    arguments = {"block_table": [[0]], "seq_lens": [3], "page_size": 16, **change}
    with pytest.raises(InvalidConfigError, match=rf"({name}).*: got .*allowed is"):
        attention.plan_from_block_tables(**arguments)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"k_pages": np.zeros((1, 16, 2, 16), np.float64)}, "k_pages"),
        ({"k_pages": np.zeros((16, 2, 16), np.float32)}, "k_pages"),
        ({"v_pages": np.zeros((2, 16, 2, 16), np.float32)}, "v_pages"),
        ({name: np.zeros((0, 16, 2, 16), np.float32) for name in ("k_pages", "v_pages")}, "plan"),
        ({name: np.zeros((1, 32, 2, 16), np.float32) for name in ("k_pages", "v_pages")}, "plan"),
        ({"v_pages": None}, "k_pages"),
        ({"q": np.zeros((1, 3, 16), np.float32)}, "q"),
        ({"q": np.zeros((1, 2, 16), np.float16)}, "q"),
        ({"kv_layout": "NDH"}, "kv_layout"),
        ({"num_threads": 0}, "num_threads"),
    ],
)
def test_pages_that_do_not_fit_are_refused_by_name(change, name) -> None:
    arguments = {
        "q": np.zeros((1, 2, 16), np.float32),
        "k_pages": np.zeros((1, 16, 2, 16), np.float32),
        "v_pages": np.zeros((1, 16, 2, 16), np.float32),
        **change,
    }
    plan = attention.plan_from_block_tables([[0]], [3], 16)
    with pytest.raises(InvalidConfigError, match=rf"{name}: got .*allowed is"):
        attention.run(plan, **arguments)


class TestPartialAttention:
    @pytest.mark.parametrize("isa", attention.available_isas())
    @pytest.mark.parametrize("logits_soft_cap", [None, 1.5])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_it_is_attention_to_all_keys(self, rng, dtype, logits_soft_cap, isa) -> None:
        q = rows(rng, 3, 6, 24, dtype=dtype)
        k, v = rows(rng, 37, 2, 24, dtype=dtype), rows(rng, 37, 2, 24, dtype=dtype)
        o, lse = attention.partial_attention(
            q, k, v, logits_soft_cap=logits_soft_cap, sm_scale=0.7, isa=isa
        )
        expected, expected_lse = reference.normalise(
            reference.partial_attn(q, k, v, logits_soft_cap=logits_soft_cap, sm_scale=0.7)
        )
        assert o.dtype == q.dtype
        assert reference.error(o, expected) <= TOLERANCE[dtype]
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-2 if dtype != "float32" else 1e-5)

    def test_without_keys_it_is_the_empty_state(self, rng) -> None:
        empty = np.zeros((0, 2, 16), np.float32)
        o, lse = attention.partial_attention(rows(rng, 3, 4, 16), empty, empty)
        assert not o.any()
        assert np.all(lse == -np.inf)

    def test_without_queries_there_is_nothing(self, rng) -> None:
        k = rows(rng, 5, 2, 16)
        o, lse = attention.partial_attention(np.zeros((0, 4, 16), np.float32), k, k)
        assert (o.shape, lse.shape) == ((0, 4, 16), (0, 4))

    def test_v_must_be_shaped_as_k(self, rng) -> None:
        with pytest.raises(InvalidConfigError, match=r"v: got .*\[4, 2, 16\]"):
            attention.partial_attention(
                rows(rng, 3, 4, 16), rows(rng, 4, 2, 16), rows(rng, 5, 2, 16)
            )


class TestMerge:
    @given(cuts=st.lists(st.integers(0, 20), max_size=4), seed=st.integers(0, 2**32 - 1))
    def test_merged_pieces_are_the_whole(self, cuts: list[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        q, k, v = rows(rng, 2, 4, 16), rows(rng, 20, 2, 16), rows(rng, 20, 2, 16)
        bounds = itertools.pairwise([0, *sorted(cuts), 20])
        states = [attention.partial_attention(q, k[a:b], v[a:b]) for a, b in bounds]
        o, lse = attention.merge_states(*(np.stack(part) for part in zip(*states, strict=True)))
        expected, expected_lse = reference.normalise(reference.partial_attn(q, k, v))
        assert reference.error(o, expected) <= 1e-5
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_two_states_merge_as_in_the_reference(self, rng, dtype: str) -> None:
        o_a, o_b = rows(rng, 3, 2, 20, dtype=dtype), rows(rng, 3, 2, 20, dtype=dtype)
        lse_a, lse_b = rows(rng, 3, 2), rows(rng, 3, 2)
        o, lse = attention.merge_state(o_a, lse_a, o_b, lse_b)
        expected, expected_lse = reference.merge_state(o_a, lse_a, o_b, lse_b)
        assert o.dtype == o_a.dtype
        assert reference.error(o, expected) <= TOLERANCE[dtype]
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-6)

    def test_the_empty_state_is_neutral_whatever_it_holds(self, rng) -> None:
        o, lse = rows(rng, 3, 2, 16), rows(rng, 3, 2)
        garbage, nothing = np.full_like(o, np.nan), np.full_like(lse, -np.inf)
        for merged, merged_lse in (
            attention.merge_state(o, lse, garbage, nothing),
            attention.merge_state(garbage, nothing, o, lse),
        ):
            np.testing.assert_array_equal(merged, o)
            np.testing.assert_array_equal(merged_lse, lse)

    def test_two_empty_states_are_empty(self) -> None:
        zero, nothing = np.zeros((1, 1, 16), np.float32), np.full((1, 1), -np.inf, np.float32)
        o, lse = attention.merge_state(zero, nothing, zero, nothing)
        assert not o.any()
        assert np.all(lse == -np.inf)

    def test_states_far_apart_do_not_overflow(self) -> None:
        a, b = np.ones((1, 1, 16), np.float32), np.full((1, 1, 16), 2, np.float32)
        high, low = np.full((1, 1), 1e4, np.float32), np.full((1, 1), -1e4, np.float32)
        o, lse = attention.merge_state(a, high, b, low)
        np.testing.assert_array_equal(o, a)
        np.testing.assert_array_equal(lse, high)

    def test_torch_in_gives_torch_out(self) -> None:
        o, lse = torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2)
        merged, merged_lse = attention.merge_states(o, lse)
        pair, pair_lse = attention.merge_state(o[0], lse[0], o[1], lse[1])
        assert torch.equal(merged, pair)
        assert torch.equal(merged_lse, pair_lse)

    def test_no_state_is_refused(self) -> None:
        with pytest.raises(InvalidConfigError, match="o: got no states"):
            attention.merge_states(
                np.zeros((0, 1, 1, 16), np.float32), np.zeros((0, 1, 1), np.float32)
            )

    def test_shapes_that_differ_are_refused_by_name(self, rng) -> None:
        o, lse = rows(rng, 3, 2, 16), rows(rng, 3, 2)
        with pytest.raises(InvalidConfigError, match="lse_b: got"):
            attention.merge_state(o, lse, o, lse[:2])
        with pytest.raises(InvalidConfigError, match="o_b: got"):
            attention.merge_state(o, lse, o[:, :1], lse)


class TestConverters:
    @pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
    def test_base_2_and_back(self, rng, kind) -> None:
        lse = kind(rows(rng, 3, 2))
        base2 = attention.lse_to_base2(lse)
        np.testing.assert_allclose(np.exp2(np.asarray(base2)), np.exp(np.asarray(lse)), rtol=1e-6)
        assert base2.dtype == lse.dtype
        np.testing.assert_allclose(attention.lse_from_base2(base2), lse, rtol=1e-6)

    def test_minus_infinity_stays(self) -> None:
        nothing = np.full((1, 1), -np.inf, np.float32)
        assert attention.lse_to_base2(nothing) == -np.inf

    @pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
    def test_heads_first_and_back(self, rng, kind) -> None:
        lse = kind(rows(rng, 3, 2))
        first = attention.lse_to_heads_first(lse)
        assert tuple(first.shape) == (2, 3)
        assert float(first[1, 2]) == float(lse[2, 1])
        np.testing.assert_array_equal(attention.lse_from_heads_first(first), lse)


@pytest.mark.parametrize("output", ["out", "lse"])
def test_outputs_in_the_memory_of_the_keys_are_refused(output) -> None:
    k = np.ones((20, 4, 8), dtype=np.float32)
    inside = k[3:4] if output == "out" else k[3].reshape(-1)[:4].reshape(1, 4)
    with pytest.raises(InvalidConfigError, match=rf"^{output}: got memory that overlaps k"):
        attention.partial_attention(np.ones((1, 4, 8), np.float32), k, k.copy(), **{output: inside})


def test_more_threads_than_any_machine_has_are_refused() -> None:
    q = np.ones((1, 4, 8), np.float32)
    with pytest.raises(InvalidConfigError, match=r"num_threads: got 1000000, .* 1 to 1024"):
        attention.partial_attention(q, q, q.copy(), num_threads=10**6)
