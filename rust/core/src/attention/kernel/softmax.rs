//! The running softmax of a row: its maximum, its sum, and the rescaling of its output.

use crate::attention::simd::math::{exp2, tanh};
use crate::attention::simd::operand::Operand;
use crate::attention::simd::{LANES, Simd};

/// A new maximum counts once it exceeds the old one by this much, in base 2: weights then reach
/// 2^8 at most, and most blocks need no rescaling.
const SLACK_LOG2: f32 = 8.0;

/// How products become scores in base 2.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScoreScale {
    /// What the products are multiplied with.
    pub(crate) product: f32,
    /// With a soft cap: what the hyperbolic tangent of that is multiplied with.
    pub(crate) cap: Option<f32>,
}

impl ScoreScale {
    /// `sm_scale`, and the cap of `cap * tanh(score / cap)`.
    pub(crate) fn new(sm_scale: f32, logits_soft_cap: Option<f32>) -> Self {
        let log2_e = std::f32::consts::LOG2_E;
        match logits_soft_cap {
            None => Self { product: sm_scale * log2_e, cap: None },
            Some(cap) => Self { product: sm_scale / cap, cap: Some(cap * log2_e) },
        }
    }
}

/// The running state of one row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowState {
    /// The maximum that weights are relative to, in base 2; -inf before the first key.
    pub(crate) max: *mut f32,
    /// The sum of the weights, by lane.
    pub(crate) sum: *mut f32,
    /// The weighted sum of values.
    pub(crate) output: *mut f32,
    /// Vectors of the output.
    pub(crate) vectors: usize,
}

/// Turns the scores of keys `begin..end` of a row into weights, in place. Keys outside get weight
/// 0, whatever their score is; strips wholly outside are left alone.
///
/// # Safety
/// `scores` is a row of scores of strips `begin / 16` to `(end - 1) / 16`, the state is writable.
#[inline(always)]
pub(crate) unsafe fn update_row<S: Simd, E: Operand<S>>(
    s: S,
    scores: *mut u8,
    (begin, end): (usize, usize),
    cap: Option<f32>,
    state: RowState,
) {
    let first = begin / LANES;
    let last = (end - 1) / LANES;
    // SAFETY: the caller's contract.
    unsafe {
        let row = scores.cast::<f32>();
        if let Some(cap) = cap {
            let cap = s.splat(cap);
            for i in first..=last {
                let at = row.add(i * LANES);
                s.store(at, s.mul(tanh(s, s.load(at)), cap));
            }
        }
        if begin % LANES != 0 || end % LANES != 0 {
            let lowest = s.splat(f32::NEG_INFINITY);
            for i in [first, last] {
                let (from, to) = (begin.max(i * LANES), end.min((i + 1) * LANES));
                let at = row.add(i * LANES);
                let kept = s.keep_lanes(s.load(at), from - i * LANES, to - i * LANES, lowest);
                s.store(at, kept);
            }
        }
        let mut largest = s.load(row.add(first * LANES));
        for i in first + 1..=last {
            largest = s.max(largest, s.load(row.add(i * LANES)));
        }
        let old = state.max.read();
        if s.any_gt(largest, s.splat(old + SLACK_LOG2)) {
            rescale(s, s.reduce_max(largest).max(old), state);
        }
        let max = state.max.read();
        // A row whose scores are all -inf or NaN has no maximum yet.
        let shift = s.splat(if max == f32::NEG_INFINITY { 0.0 } else { max });
        let mut sum = s.load(state.sum);
        for i in first..=last {
            let weight = exp2(s, s.sub(s.load(row.add(i * LANES)), shift));
            sum = s.add(sum, weight);
            E::store_scalars(s, scores.add(i * LANES * E::SCALAR_BYTES), weight);
        }
        s.store(state.sum, sum);
    }
}

/// Makes `max` the row's maximum.
///
/// # Safety
/// The state is writable.
#[inline(always)]
unsafe fn rescale<S: Simd>(s: S, max: f32, state: RowState) {
    // SAFETY: the caller's contract.
    unsafe {
        let factor = exp2(s, s.splat(state.max.read() - max));
        state.max.write(max);
        s.store(state.sum, s.mul(s.load(state.sum), factor));
        for vector in 0..state.vectors {
            let at = state.output.add(vector * LANES);
            s.store(at, s.mul(s.load(at), factor));
        }
    }
}
