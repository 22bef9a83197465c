//! Moving rows into and out of the packed layout, strip by strip.

use std::ptr;

use crate::kv::dtype::Dtype;
use crate::kv::layout::{STRIP, pack};

/// One strip of K and V in the packed layout.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackedStrip {
    pub(crate) k: *mut u8,
    pub(crate) v: *mut u8,
    pub(crate) head_dim: usize,
    pub(crate) dtype: Dtype,
}

/// Rows of K and V of up to 16 consecutive tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StripRows {
    k: [*const u8; STRIP],
    v: [*const u8; STRIP],
    len: usize,
}

impl StripRows {
    /// No rows.
    pub(crate) const fn new() -> Self {
        Self { k: [ptr::null(); STRIP], v: [ptr::null(); STRIP], len: 0 }
    }

    /// Adds the next token's rows.
    pub(crate) fn push(&mut self, k: *const u8, v: *const u8) {
        (self.k[self.len], self.v[self.len]) = (k, v);
        self.len += 1;
    }

    /// Rows so far.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }
}

impl PackedStrip {
    /// Writes rows as the strip's tokens from `first` on.
    ///
    /// # Safety
    /// The strip is writable, by nobody else, for its 16 tokens; the rows are `head_dim` readable
    /// elements, of any alignment; `first` and their number are at most 16 together.
    pub(crate) unsafe fn write(&self, first: usize, rows: &StripRows) {
        let (k, v) = (&rows.k[..rows.len], &rows.v[..rows.len]);
        let row_bytes = self.head_dim * self.dtype.itemsize();
        // SAFETY: the caller's contract. A line of K holds one 4-byte or 2-byte unit of each of
        // the 16 tokens: an element, or a pair of bfloat16.
        unsafe {
            match self.dtype {
                Dtype::F32 | Dtype::Bf16 => transpose::<u32>(self.k, first, k, row_bytes / 4),
                Dtype::F16 => transpose::<u16>(self.k, first, k, row_bytes / 2),
            }
            if pack(self.dtype) == 1 {
                for (t, &row) in v.iter().enumerate() {
                    let to = self.v.add((first + t) * row_bytes);
                    to.copy_from_nonoverlapping(row, row_bytes);
                }
            } else {
                self.write_v_pairs(first, v);
            }
        }
    }

    /// # Safety
    /// As [`Self::write`].
    unsafe fn write_v_pairs(&self, first: usize, rows: &[*const u8]) {
        let mut t = 0;
        // SAFETY: the caller's contract.
        unsafe {
            while t < rows.len() {
                let token = first + t;
                let to = self.v.cast::<u16>().add(token / 2 * 2 * self.head_dim);
                let row = rows[t].cast::<u16>();
                if token.is_multiple_of(2) && t + 1 < rows.len() {
                    let other = rows[t + 1].cast::<u16>();
                    for i in 0..self.head_dim {
                        let pair = [row.add(i).read_unaligned(), other.add(i).read_unaligned()];
                        to.cast::<[u16; 2]>().add(i).write(pair);
                    }
                    t += 2;
                } else {
                    for i in 0..self.head_dim {
                        to.add(2 * i + token % 2).write(row.add(i).read_unaligned());
                    }
                    t += 1;
                }
            }
        }
    }

    /// Reads one token's rows.
    ///
    /// # Safety
    /// The strip is readable; `k` and `v` are `head_dim` writable elements, of any alignment.
    pub(crate) unsafe fn read(&self, token: usize, k: *mut u8, v: *mut u8) {
        let row_bytes = self.head_dim * self.dtype.itemsize();
        // SAFETY: the caller's contract; units of K as in `write`.
        unsafe {
            match self.dtype {
                Dtype::F32 | Dtype::Bf16 => column::<u32>(self.k, token, k, row_bytes / 4),
                Dtype::F16 => column::<u16>(self.k, token, k, row_bytes / 2),
            }
            if pack(self.dtype) == 1 {
                v.copy_from_nonoverlapping(self.v.add(token * row_bytes), row_bytes);
            } else {
                let from = self.v.cast::<u16>().add(token / 2 * 2 * self.head_dim + token % 2);
                for i in 0..self.head_dim {
                    v.cast::<u16>().add(i).write_unaligned(from.add(2 * i).read());
                }
            }
        }
    }
}

/// Writes rows of units as columns of lines of 16 units, from column `first` on.
///
/// # Safety
/// Rows are `len` readable units, `to` is `len` writable lines.
unsafe fn transpose<T: Copy>(to: *mut u8, first: usize, rows: &[*const u8], len: usize) {
    let to = to.cast::<T>();
    // SAFETY: the caller's contract.
    unsafe {
        for unit in 0..len {
            let line = to.add(unit * STRIP + first);
            for (t, row) in rows.iter().enumerate() {
                line.add(t).write(row.cast::<T>().add(unit).read_unaligned());
            }
        }
    }
}

/// Reads a column of lines of 16 units.
///
/// # Safety
/// `from` is `len` readable lines, `to` is `len` writable units.
unsafe fn column<T: Copy>(from: *const u8, token: usize, to: *mut u8, len: usize) {
    let from = from.cast::<T>();
    // SAFETY: the caller's contract.
    unsafe {
        for unit in 0..len {
            to.cast::<T>().add(unit).write_unaligned(from.add(unit * STRIP + token).read());
        }
    }
}
