//! The two matrix products, by register tiles: scores = Q K^T, and output += weights V.

#![expect(
    clippy::needless_range_loop,
    reason = "register tiles: loops over constant bounds, which the compiler unrolls"
)]

use super::SCORE_STRIDE;
use super::block::Strip;
use crate::attention::simd::operand::Operand;
use crate::attention::simd::{LANES, Simd};
use crate::kv::layout::STRIP;

/// The query side of a score product: rows of scalars.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Queries {
    /// The tile's first row.
    pub(crate) rows: *const u8,
    /// Bytes from one row to the next.
    pub(crate) stride: usize,
    /// Elements of a row.
    pub(crate) head_dim: usize,
}

/// Steps of a product between two bursts of prefetching.
const BURST_STEPS: usize = 16;

/// A tile's share of prefetching the next block: the tiles of a block share its lines equally, so
/// that memory is read at an even pace while they compute.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prefetch<'a> {
    /// The next block's strips; none if there is no next block.
    pub(crate) strips: &'a [Strip],
    /// The tile's number, and the number of tiles.
    pub(crate) tile: usize,
    pub(crate) num_tiles: usize,
}

/// Lines to prefetch, in bursts.
#[derive(Debug, Clone, Copy)]
struct Lines {
    next: *const u8,
    per_burst: usize,
}

impl Lines {
    const NONE: Self = Self { next: std::ptr::null(), per_burst: 0 };

    #[inline(always)]
    fn burst<S: Simd>(&mut self, s: S) {
        for _ in 0..self.per_burst {
            s.prefetch(self.next);
            self.next = self.next.wrapping_add(LINE);
        }
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Scores of `R` rows against the keys of `strips`, times `scale`, to columns of `scores` in steps
/// of 16; rows are [`SCORE_STRIDE`] bytes apart.
///
/// # Safety
/// `R` query rows and the strips' K are readable, `R` rows of scores are writable.
#[inline(always)]
pub(crate) unsafe fn score_tile<S: Simd, E: Operand<S>, const R: usize>(
    s: S,
    queries: Queries,
    strips: &[Strip],
    scale: S::V,
    scores: *mut u8,
    prefetch: Prefetch<'_>,
) {
    let strip_bytes = queries.head_dim / E::PACK * E::LINE_BYTES;
    // A pair of strips is mostly contiguous; where it is not, prefetching misses a few lines.
    let bursts = (queries.head_dim / E::PACK).div_ceil(BURST_STEPS);
    let per_burst = (2 * strip_bytes).div_ceil(LINE * bursts * prefetch.num_tiles);
    let mut i = 0;
    // SAFETY: the caller's contract; `i` stays inside `strips`.
    unsafe {
        while i + 2 <= strips.len() {
            let k = [strips.get_unchecked(i).k, strips.get_unchecked(i + 1).k];
            let lines = if i < prefetch.strips.len() {
                let skipped = 2 * strip_bytes * prefetch.tile / prefetch.num_tiles;
                Lines { next: prefetch.strips.get_unchecked(i).k.wrapping_add(skipped), per_burst }
            } else {
                Lines::NONE
            };
            let to = scores.add(i * LANES * 4);
            score_strips::<S, E, R, 2>(s, queries, k, scale, to, lines);
            i += 2;
        }
        if i < strips.len() {
            let k = [strips.get_unchecked(i).k];
            let to = scores.add(i * LANES * 4);
            score_strips::<S, E, R, 1>(s, queries, k, scale, to, Lines::NONE);
        }
    }
}

/// # Safety
/// As [`score_tile`].
#[inline(always)]
unsafe fn score_strips<S: Simd, E: Operand<S>, const R: usize, const N: usize>(
    s: S,
    queries: Queries,
    k: [*const u8; N],
    scale: S::V,
    scores: *mut u8,
    mut prefetch: Lines,
) {
    let mut acc = [[s.splat(0.0); N]; R];
    let steps = queries.head_dim / E::PACK;
    let mut step = 0;
    // SAFETY: a strip has head_dim / PACK lines, a query row as many scalars times PACK.
    unsafe {
        while step < steps {
            prefetch.burst(s);
            let burst_end = steps.min(step + BURST_STEPS);
            while step < burst_end {
                let mut lines = [E::load(s, k[0].add(step * E::LINE_BYTES)); N];
                for n in 1..N {
                    lines[n] = E::load(s, k[n].add(step * E::LINE_BYTES));
                }
                let scalars = queries.rows.add(step * E::PACK * E::SCALAR_BYTES);
                for r in 0..R {
                    let scalar = scalars.add(r * queries.stride);
                    for n in 0..N {
                        acc[r][n] = E::multiply_add(s, acc[r][n], lines[n], scalar);
                    }
                }
                step += 1;
            }
        }
        for r in 0..R {
            for n in 0..N {
                let to = scores.add(r * SCORE_STRIDE + n * LANES * 4);
                s.store(to.cast(), s.mul(acc[r][n], scale));
            }
        }
    }
}

/// The output side of a value product.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outputs {
    /// The tile's first row of sums, float32.
    pub(crate) rows: *mut f32,
    /// Vectors of a row.
    pub(crate) vectors: usize,
    /// Bytes from one line of V to the next of the same lanes: a row of `head_dim` elements,
    /// times PACK.
    pub(crate) v_stride: usize,
}

impl Outputs {
    /// The rows from row `r` on.
    #[inline(always)]
    pub(crate) fn at_row(self, r: usize) -> Self {
        Self { rows: self.rows.wrapping_add(r * self.vectors * LANES), ..self }
    }
}

/// Adds the values of keys `begin..end` (indices into `strips`' keys), times the weights of `R`
/// rows, to the outputs. With `PACK` 2, both bounds are even.
///
/// # Safety
/// The values of those keys and `R` rows of weights are readable, `R` rows of output are writable.
#[inline(always)]
pub(crate) unsafe fn value_tile<S: Simd, E: Operand<S>, const R: usize>(
    s: S,
    weights: *const u8,
    strips: &[Strip],
    keys: (usize, usize),
    outputs: Outputs,
    prefetch: Prefetch<'_>,
) {
    let mut vector = 0;
    // SAFETY: the caller's contract.
    unsafe {
        while vector + 2 <= outputs.vectors {
            value_vectors::<S, E, R, 2>(s, weights, strips, keys, outputs, vector, prefetch);
            vector += 2;
        }
        if vector < outputs.vectors {
            value_vectors::<S, E, R, 1>(s, weights, strips, keys, outputs, vector, prefetch);
        }
    }
}

/// # Safety
/// As [`value_tile`].
#[inline(always)]
unsafe fn value_vectors<S: Simd, E: Operand<S>, const R: usize, const N: usize>(
    s: S,
    weights: *const u8,
    strips: &[Strip],
    (begin, end): (usize, usize),
    outputs: Outputs,
    vector: usize,
    prefetch: Prefetch<'_>,
) {
    // The passes over the vectors of a row share a strip's lines, too.
    let passes = outputs.vectors.div_ceil(2) * prefetch.num_tiles;
    let pass = prefetch.tile * outputs.vectors.div_ceil(2) + vector / 2;
    let strip_bytes = STRIP / E::PACK * outputs.v_stride;
    let per_burst = strip_bytes.div_ceil(LINE * passes);
    let skipped = strip_bytes * pass / passes;
    // SAFETY: the caller's contract; a line may reach past its row into what follows, which the
    // storage allows, and those lanes are dropped in the end.
    unsafe {
        let rows = outputs.rows.add(vector * LANES);
        let mut acc = [[s.splat(0.0); N]; R];
        for r in 0..R {
            for n in 0..N {
                acc[r][n] = s.load(rows.add((r * outputs.vectors + n) * LANES));
            }
        }
        let mut key = begin;
        while key < end {
            let strip = key / STRIP;
            let strip_end = end.min((strip + 1) * STRIP);
            if strip < prefetch.strips.len() {
                let next = prefetch.strips.get_unchecked(strip).v.wrapping_add(skipped);
                Lines { next, per_burst }.burst(s);
            }
            let mut v = strips
                .get_unchecked(strip)
                .v
                .add(key % STRIP / E::PACK * outputs.v_stride + vector * E::LINE_BYTES);
            while key < strip_end {
                let mut lines = [E::load(s, v); N];
                for n in 1..N {
                    lines[n] = E::load(s, v.add(n * E::LINE_BYTES));
                }
                for r in 0..R {
                    let scalar = weights.add(r * SCORE_STRIDE + key * E::SCALAR_BYTES);
                    for n in 0..N {
                        acc[r][n] = E::multiply_add(s, acc[r][n], lines[n], scalar);
                    }
                }
                v = v.add(outputs.v_stride);
                key += E::PACK;
            }
        }
        for r in 0..R {
            for n in 0..N {
                s.store(rows.add((r * outputs.vectors + n) * LANES), acc[r][n]);
            }
        }
    }
}

/// Adds the values of keys `begin..end`, any bounds, times the weights of one row.
///
/// # Safety
/// As [`value_tile`] with one row.
#[inline(always)]
pub(crate) unsafe fn value_row<S: Simd, E: Operand<S>>(
    s: S,
    weights: *const u8,
    strips: &[Strip],
    (mut begin, mut end): (usize, usize),
    outputs: Outputs,
) {
    // SAFETY: the caller's contract.
    unsafe {
        if E::PACK == 2 && begin < end && begin % 2 == 1 {
            value_step::<S, E>(s, weights, strips, begin, outputs);
            begin += 1;
        }
        if E::PACK == 2 && begin < end && end % 2 == 1 {
            end -= 1;
            value_step::<S, E>(s, weights, strips, end, outputs);
        }
        if begin < end {
            let none = Prefetch { strips: &[], tile: 0, num_tiles: 1 };
            value_tile::<S, E, 1>(s, weights, strips, (begin, end), outputs, none);
        }
    }
}

/// One key of a pair whose other key is masked, and therefore not multiplied.
///
/// # Safety
/// As [`value_row`].
#[inline(always)]
unsafe fn value_step<S: Simd, E: Operand<S>>(
    s: S,
    weights: *const u8,
    strips: &[Strip],
    key: usize,
    outputs: Outputs,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let weight = s.splat(E::scalar(weights.add(key * E::SCALAR_BYTES)));
        let v = strips.get_unchecked(key / STRIP).v.add(key % STRIP / E::PACK * outputs.v_stride);
        for vector in 0..outputs.vectors {
            let line = E::load_step(s, v.add(vector * E::LINE_BYTES), key % E::PACK);
            let to = outputs.rows.add(vector * LANES);
            s.store(to, s.fma(weight, line, s.load(to)));
        }
    }
}
