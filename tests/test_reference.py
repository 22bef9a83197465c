import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkcache import InvalidConfigError, reference
from chunkcache.reference import Chunk, Partial, SharedChunk

Generator = np.random.Generator


def naive(q, k, v, i, *, sm_scale=None, logits_soft_cap=None, window_left=-1):
    """One query row and head after another, straight from the definition of attention."""
    rows, num_qo_heads, head_dim = q.shape
    group = num_qo_heads // k.shape[1]
    scale = head_dim**-0.5 if sm_scale is None else sm_scale
    out = np.zeros(q.shape)
    lse = np.full((rows, num_qo_heads), -np.inf)
    for r in range(rows):
        for h in range(num_qo_heads):
            first = 0 if window_left < 0 else max(0, i[r] - window_left)
            scores = k[first : i[r] + 1, h // group] @ q[r, h] * scale
            if logits_soft_cap is not None:
                scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
            if scores.size:
                weights = np.exp(scores)
                out[r, h] = weights @ v[first : i[r] + 1, h // group] / weights.sum()
                lse[r, h] = np.log(weights.sum())
    return out, lse


@pytest.mark.parametrize("window_left", [-1, 0, 3, 100])
@pytest.mark.parametrize("logits_soft_cap", [None, 0.7])
@pytest.mark.parametrize("group", [1, 3])
def test_attention_is_the_definition(
    rng: Generator, group: int, logits_soft_cap: float | None, window_left: int
) -> None:
    q = rng.standard_normal((4, 2 * group, 8))
    k, v = rng.standard_normal((2, 10, 2, 8))
    options = {"logits_soft_cap": logits_soft_cap, "window_left": window_left, "sm_scale": 0.3}
    o, lse = reference.attention(q, k, v, **options)
    expected_o, expected_lse = naive(q, k, v, [6, 7, 8, 9], **options)
    np.testing.assert_allclose(o, expected_o, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-14)


def test_a_row_without_keys_is_zero_and_minus_infinity(rng: Generator) -> None:
    q = rng.standard_normal((2, 3, 8))
    o, lse = reference.attention(q, np.zeros((0, 3, 8)), np.zeros((0, 3, 8)), q_positions=[0, 0])
    assert not o.any()
    assert np.all(lse == -np.inf)


@given(
    cuts=st.lists(st.integers(0, 12), max_size=5),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_pieces_in_any_order_give_the_whole(cuts: list[int], order, seed: int) -> None:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((3, 2, 4)) * 10
    k, v = rng.standard_normal((2, 12, 1, 4)) * 10
    bounds = [0, *sorted(cuts), 12]
    pieces = [reference.partial_attn(q, k[a:b], v[a:b]) for a, b in itertools.pairwise(bounds)]
    order.shuffle(pieces)
    state = reference.empty_partial(3, 2, 4)
    for piece in pieces:
        state = reference.attn_reduce(state, piece)
    expected = reference.normalise(reference.partial_attn(q, k, v))
    np.testing.assert_allclose(reference.normalise(state)[0], expected[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(reference.normalise(state)[1], expected[1], rtol=1e-9, atol=1e-12)


def test_the_empty_state_is_neutral(rng: Generator) -> None:
    q = rng.standard_normal((2, 2, 4))
    k, v = rng.standard_normal((2, 5, 2, 4))
    state = reference.partial_attn(q, k, v)
    joined = reference.attn_reduce(reference.empty_partial(2, 2, 4), state)
    for got, expected in zip(joined, state, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_merge_state_joins_finished_results(rng: Generator) -> None:
    q = rng.standard_normal((2, 4, 8))
    k, v = rng.standard_normal((2, 9, 2, 8))
    a = reference.normalise(reference.partial_attn(q, k[:4], v[:4]))
    b = reference.normalise(reference.partial_attn(q, k[4:], v[4:]))
    o, lse = reference.merge_state(*a, *b)
    expected_o, expected_lse = reference.normalise(reference.partial_attn(q, k, v))
    np.testing.assert_allclose(o, expected_o, rtol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)


def test_merge_state_of_two_empty_results_is_empty() -> None:
    zero, nothing = np.zeros((1, 1, 4)), np.full((1, 1), -np.inf)
    o, lse = reference.merge_state(zero, nothing, zero, nothing)
    assert not o.any()
    assert lse[0, 0] == -np.inf


@pytest.mark.parametrize("window_left", [-1, 2, 7])
def test_two_phases_over_a_three_level_tree_equal_plain_attention(
    rng: Generator, window_left: int
) -> None:
    # Rows 0..3 share chunk A; rows 0 and 1 also B. Private lengths are ragged, the last row has
    # none.
    lengths, c = [3, 1, 4, 0], 4

    def keys(n: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.standard_normal((n, 2, 8)), rng.standard_normal((n, 2, 8))

    a, b = keys(c), keys(c)
    own = [keys(n) for n in lengths]
    paths: Sequence[list] = [[a, b, own[0]], [a, b, own[1]], [a, own[2]], [a, own[3]]]
    totals = [sum(len(k) for k, _ in path) for path in paths]
    q = rng.standard_normal((4, 4, 8))
    shared = [SharedChunk(Chunk(*a, 0), 0, 4), SharedChunk(Chunk(*b, c), 0, 2)]
    private = [[Chunk(*kv, total - n)] for kv, total, n in zip(own, totals, lengths, strict=True)]
    o, lse = reference.two_phase_attention(
        q, [n - 1 for n in totals], shared, private, window_left=window_left
    )
    for u, path in enumerate(paths):
        k, v = (np.concatenate(part) for part in zip(*path, strict=True))
        expected_o, expected_lse = reference.attention(q[u : u + 1], k, v, window_left=window_left)
        np.testing.assert_allclose(o[u : u + 1], expected_o, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse[u : u + 1], expected_lse, rtol=1e-12)


def test_the_paper_state_keeps_the_largest_score_apart() -> None:
    q, k, v = np.ones((1, 1, 1)), np.array([[[1.0]], [[3.0]]]), np.array([[[10.0]], [[20.0]]])
    state = reference.partial_attn(q, k, v, sm_scale=1.0)
    x = np.exp(-2.0)
    expected = Partial(np.array([[[10 * x + 20]]]), np.array([[3.0]]), np.array([[1 + x]]))
    for got, want in zip(state, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-15)


def test_error_takes_the_worst_row_and_head() -> None:
    ref = np.array([[[1.0, -2.0], [4.0, 4.0]]])
    out = ref + np.array([[[0.0, 0.2], [0.1, 0.0]]])
    assert reference.error(out, ref) == pytest.approx(0.1)


def test_error_of_a_zero_reference_is_infinite_unless_met() -> None:
    zero = np.zeros((1, 1, 2))
    assert reference.error(zero, zero) == 0
    assert reference.error(zero + 1e-30, zero) == np.inf


class TestFp8:
    """Conversion to e4m3, against torch's."""

    def test_every_bit_pattern(self):
        bits = np.arange(256, dtype=np.uint8).reshape(1, -1)
        values = torch.from_numpy(bits).view(torch.float8_e4m3fn).double().numpy()
        assert np.array_equal(reference.dequantise_fp8(bits), values, equal_nan=True)
        back = reference.quantise_fp8(values)
        assert np.array_equal(back[:, :255], bits[:, :255])

    def test_every_half(self):
        halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
        kept = halves[halves.abs() <= 448].reshape(1, -1)
        assert np.array_equal(
            reference.quantise_fp8(kept.float().numpy()),
            kept.to(torch.float8_e4m3fn).view(torch.uint8).numpy(),
        )

    def test_what_is_too_large_becomes_the_largest(self):
        x = np.array([[449, 1e30, np.inf, -500, -np.inf, np.nan]], dtype=np.float32)
        assert reference.quantise_fp8(x).tolist() == [[0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F]]

    def test_scales_are_those_of_heads(self):
        x = np.random.default_rng(0).standard_normal((5, 2, 16)).astype(np.float32)
        scale = np.array([0.5, 0.01], dtype=np.float32)
        found = reference.dequantise_fp8(reference.quantise_fp8(x, scale), scale)
        assert (np.abs(found - x) <= 0.0626 * np.abs(x) + 0.5 * 2.0**-9).all()

    @pytest.mark.parametrize("scale", [np.ones(3), np.ones((1, 2))])
    def test_other_scales_are_refused(self, scale):
        with pytest.raises(InvalidConfigError, match="scale: got shape"):
            reference.quantise_fp8(np.zeros((5, 2, 16)), scale)

    def test_other_bits_are_refused(self):
        with pytest.raises(InvalidConfigError, match="bits: got int64, allowed is uint8"):
            reference.dequantise_fp8(np.zeros((1, 16), dtype=np.int64))
