//! Where states go: to the caller's arrays, or to partial states that are merged afterwards.

use super::simd::{LANES, Simd};
use crate::kv::{Dtype, RowsMut};

/// The caller's arrays.
#[derive(Debug)]
pub(crate) struct Results<'a> {
    /// `[rows, num_qo_heads, head_dim]`.
    pub(crate) out: &'a RowsMut<'a>,
    /// `[rows, num_qo_heads]`, contiguous.
    pub(crate) lse: Option<*mut f32>,
}

// SAFETY: tasks write rows of their own.
unsafe impl Sync for Results<'_> {}

/// Partial states: `o` `[slots, num_qo_heads, head_dim]` and `lse` `[slots, num_qo_heads]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Partials {
    pub(crate) o: *mut f32,
    pub(crate) lse: *mut f32,
    pub(crate) num_qo_heads: usize,
    pub(crate) head_dim: usize,
}

// SAFETY: tasks write slots of their own, and merges read them after all tasks have ended.
unsafe impl Send for Partials {}
// SAFETY: as above.
unsafe impl Sync for Partials {}

impl Partials {
    /// The addresses of one slot and head.
    pub(crate) fn at(&self, slot: usize, head: usize) -> (*mut f32, *mut f32) {
        let row = slot * self.num_qo_heads + head;
        (self.o.wrapping_add(row * self.head_dim), self.lse.wrapping_add(row))
    }
}

/// Where a task's states go.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Output<'a> {
    /// Each token's query row of the results.
    Direct(&'a Results<'a>),
    /// Slots from `first_slot` on, one for each token of the task.
    Partial {
        /// All partial states.
        partials: &'a Partials,
        /// The slot of the task's first token.
        first_slot: usize,
    },
}

impl Output<'_> {
    /// Writes one state, `o * factor` and `lse`: of query row `q_row`, which is the task's token
    /// `token`.
    ///
    /// # Safety
    /// `o` is `head_dim` float32, readable to whole vectors; the row is the caller's alone.
    #[inline(always)]
    pub(crate) unsafe fn write<S: Simd>(
        &self,
        s: S,
        (q_row, token, head): (usize, usize, usize),
        o: *const f32,
        factor: S::V,
        lse: f32,
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            match self {
                Self::Direct(results) => results.write(s, q_row, head, o, factor, lse),
                Self::Partial { partials, first_slot } => {
                    let (to, to_lse) = partials.at(first_slot + token, head);
                    store_row(s, Dtype::F32, o, factor, to.cast(), partials.head_dim);
                    to_lse.write(lse);
                }
            }
        }
    }
}

impl Results<'_> {
    /// Writes one state, `o * factor` and `lse`.
    ///
    /// # Safety
    /// As [`Output::write`].
    #[inline(always)]
    pub(crate) unsafe fn write<S: Simd>(
        &self,
        s: S,
        q_row: usize,
        head: usize,
        o: *const f32,
        factor: S::V,
        lse: f32,
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            let head_dim = self.out.layout().head_dim;
            store_row(s, self.out.dtype(), o, factor, self.out.row(q_row, head), head_dim);
            if let Some(to) = self.lse {
                to.add(q_row * self.out.layout().num_heads + head).write(lse);
            }
        }
    }
}

/// Writes float32 times a factor as elements of `dtype`.
///
/// # Safety
/// `len` elements are writable at `to` and readable, to whole vectors, at `from`.
#[inline(always)]
pub(crate) unsafe fn store_row<S: Simd>(
    s: S,
    dtype: Dtype,
    from: *const f32,
    factor: S::V,
    to: *mut u8,
    len: usize,
) {
    let itemsize = dtype.itemsize();
    // SAFETY: the caller's contract; the last elements go by way of a whole vector here.
    unsafe {
        let mut begin = 0;
        while begin + LANES <= len {
            let scaled = s.mul(s.load(from.add(begin)), factor);
            store_vector(s, dtype, to.add(begin * itemsize), scaled);
            begin += LANES;
        }
        if begin < len {
            let mut tail = [0u8; LANES * 4];
            store_vector(s, dtype, tail.as_mut_ptr(), s.mul(s.load(from.add(begin)), factor));
            let bytes = (len - begin) * itemsize;
            to.add(begin * itemsize).copy_from_nonoverlapping(tail.as_ptr(), bytes);
        }
    }
}

/// # Safety
/// 16 elements are writable at `to`.
#[inline(always)]
unsafe fn store_vector<S: Simd>(s: S, dtype: Dtype, to: *mut u8, vector: S::V) {
    // SAFETY: the caller's contract.
    unsafe {
        match dtype {
            Dtype::F32 => s.store(to.cast(), vector),
            Dtype::F16 => s.store_f16(to.cast(), vector),
            Dtype::Bf16 => s.store_bf16(to.cast(), vector),
        }
    }
}

/// Reads elements of `dtype` as float32.
///
/// # Safety
/// `len` elements are readable at `from` and writable, to whole vectors, at `to`.
#[inline(always)]
pub(crate) unsafe fn load_row<S: Simd>(
    s: S,
    dtype: Dtype,
    from: *const u8,
    to: *mut f32,
    len: usize,
) {
    let itemsize = dtype.itemsize();
    // SAFETY: the caller's contract; the last elements go by way of a whole vector here.
    unsafe {
        let mut tail = [0u8; LANES * 4];
        let mut begin = 0;
        while begin < len {
            let count = LANES.min(len - begin);
            let mut at = from.add(begin * itemsize);
            if count < LANES {
                tail.as_mut_ptr().copy_from_nonoverlapping(at, count * itemsize);
                at = tail.as_ptr();
            }
            let vector = match dtype {
                Dtype::F32 => s.load(at.cast()),
                Dtype::F16 => s.load_f16(at.cast()),
                Dtype::Bf16 => s.load_bf16(at.cast()),
            };
            s.store(to.add(begin), vector);
            begin += count;
        }
    }
}
