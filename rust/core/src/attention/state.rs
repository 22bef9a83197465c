//! The partial attention state `(o, lse)` and its merge: the paper's `attn_reduce`, on normalised
//! outputs.

use super::output::{load_row, store_row};
use super::simd::{LANES, Simd};
use super::{Isa, kernel::dispatch};
use crate::error::{Error, Result};
use crate::kv::rows::check_rows;
use crate::kv::{Rows, RowsMut};

/// A state to merge: `o` as float32, `head_dim` long, and its `lse`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartState {
    o: *const f32,
    lse: f32,
    /// Its share of the result.
    weight: f32,
}

impl PartState {
    /// A state.
    pub(crate) const fn new(o: *const f32, lse: f32) -> Self {
        Self { o, lse, weight: 0.0 }
    }
}

/// Merges states in the order given: `lse = ln(sum exp(lse_i))`, `o = sum exp(lse_i - lse) o_i`.
/// States with `lse` -inf are empty, and their `o` is not read; with no others, `o` is 0.
///
/// # Safety
/// Each `o` is `len` readable float32, `out` is writable to whole vectors.
#[inline(always)]
pub(crate) unsafe fn merge<S: Simd>(
    s: S,
    parts: &mut [PartState],
    out: *mut f32,
    len: usize,
) -> f32 {
    let largest = parts.iter().fold(f32::NEG_INFINITY, |m, part| m.max(part.lse));
    let mut sum = 0.0;
    for part in parts.iter_mut() {
        // Without the test, -inf less -inf would be NaN; NaN itself is kept.
        if part.lse != f32::NEG_INFINITY {
            part.weight = (part.lse - largest).exp();
            sum += part.weight;
        }
    }
    for part in parts.iter_mut() {
        part.weight /= sum;
    }
    let merged = parts.iter().filter(|part| part.lse != f32::NEG_INFINITY);
    let mut begin = 0;
    // SAFETY: the caller's contract; the last vector of a part goes by way of a whole one.
    unsafe {
        while begin < len {
            let mut total = s.splat(0.0);
            for part in merged.clone() {
                let values = if begin + LANES <= len {
                    s.load(part.o.add(begin))
                } else {
                    let mut tail = [0.0f32; LANES];
                    tail.as_mut_ptr().copy_from_nonoverlapping(part.o.add(begin), len - begin);
                    s.load(tail.as_ptr())
                };
                total = s.fma(s.splat(part.weight), values, total);
            }
            s.store(out.add(begin), total);
            begin += LANES;
        }
    }
    if sum == 0.0 { f32::NEG_INFINITY } else { largest + sum.ln() }
}

/// Merges two states over disjoint sets of keys into the state over all of them.
///
/// `o_a`, `o_b` and `o` are `[tokens, heads, head_dim]`, of any element types; `lse_a`, `lse_b` and
/// `lse` are natural logarithms `[tokens, heads]`. The empty state is `(0, -inf)`.
///
/// # Errors
/// [`Error::InvalidConfig`] when shapes differ.
pub fn merge_state(
    o_a: &Rows<'_>,
    lse_a: &[f32],
    o_b: &Rows<'_>,
    lse_b: &[f32],
    o: &mut RowsMut<'_>,
    lse: &mut [f32],
) -> Result<()> {
    merge_states(&[(*o_a, lse_a), (*o_b, lse_b)], o, lse)
}

/// Merges any number of states over disjoint sets of keys, in the order given; as [`merge_state`].
///
/// # Errors
/// [`Error::InvalidConfig`] when shapes differ.
pub fn merge_states(
    states: &[(Rows<'_>, &[f32])],
    o: &mut RowsMut<'_>,
    lse: &mut [f32],
) -> Result<()> {
    let layout = *o.layout();
    let num_rows = layout.num_tokens * layout.num_heads;
    let mut lengths = vec![("lse", lse.len())];
    for (rows, state_lse) in states {
        let expected = (layout.num_heads, layout.head_dim, rows.dtype());
        check_rows("o", rows.layout(), rows.dtype(), expected)?;
        if rows.layout().num_tokens != layout.num_tokens {
            let allowed = format!("{}, as the result", layout.num_tokens);
            return Err(Error::invalid(
                "o",
                format!("{} tokens", rows.layout().num_tokens),
                allowed,
            ));
        }
        lengths.push(("lse of a state", state_lse.len()));
    }
    for (argument, len) in lengths {
        if len != num_rows {
            let allowed = format!("[{}, {}]", layout.num_tokens, layout.num_heads);
            return Err(Error::invalid(argument, format!("{len} values"), allowed));
        }
    }
    dispatch::on(Isa::detect(), MergeRows { states, o, lse });
    Ok(())
}

struct MergeRows<'a, 'data> {
    states: &'a [(Rows<'data>, &'data [f32])],
    o: &'a RowsMut<'a>,
    lse: &'a mut [f32],
}

impl dispatch::Run for MergeRows<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let layout = *self.o.layout();
        let padded = layout.head_dim.next_multiple_of(LANES);
        let mut inputs = vec![0.0f32; padded * self.states.len()];
        let mut merged = vec![0.0f32; padded];
        let mut parts = Vec::with_capacity(self.states.len());
        for token in 0..layout.num_tokens {
            for head in 0..layout.num_heads {
                let row = token * layout.num_heads + head;
                parts.clear();
                // SAFETY: shapes were checked, and the buffers hold whole vectors.
                unsafe {
                    for (i, (rows, lse)) in self.states.iter().enumerate() {
                        let at = inputs.as_mut_ptr().add(i * padded);
                        load_row(s, rows.dtype(), rows.row(token, head), at, layout.head_dim);
                        parts.push(PartState::new(at, lse[row]));
                    }
                    self.lse[row] = merge(s, &mut parts, merged.as_mut_ptr(), layout.head_dim);
                    let to = self.o.row(token, head);
                    store_row(
                        s,
                        self.o.dtype(),
                        merged.as_ptr(),
                        s.splat(1.0),
                        to,
                        layout.head_dim,
                    );
                }
            }
        }
    }
}
