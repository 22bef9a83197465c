//! How stored elements enter a matrix product: a vector of them times a broadcast scalar.

use super::{LANES, Simd};
use crate::kv::Dtype;

/// The stored side (K or V) of a product as a line of 16 lanes, each with [`PACK`](Self::PACK)
/// consecutive steps of the contraction; and the format of the other side (queries, weights).
pub(crate) trait Operand<S: Simd>: Copy {
    /// A line in registers.
    type Line: Copy;

    /// The stored type.
    const DTYPE: Dtype;
    /// Contraction steps of a line, as the packed layout has them.
    const PACK: usize;
    /// Bytes of a line.
    const LINE_BYTES: usize = LANES * Self::PACK * Self::DTYPE.itemsize();
    /// Bytes of one element of the other side.
    const SCALAR_BYTES: usize;

    /// A line.
    ///
    /// # Safety
    /// `LINE_BYTES` are readable.
    unsafe fn load(s: S, p: *const u8) -> Self::Line;

    /// `acc + line * scalars`, the sum over the steps of a line.
    ///
    /// # Safety
    /// `PACK` scalars are readable.
    unsafe fn multiply_add(s: S, acc: S::V, line: Self::Line, scalars: *const u8) -> S::V;

    /// One step of a line, as float32; called for `PACK` 2 only.
    ///
    /// # Safety
    /// `LINE_BYTES` are readable.
    unsafe fn load_step(s: S, p: *const u8, step: usize) -> S::V;

    /// One scalar, as float32.
    ///
    /// # Safety
    /// It is readable.
    unsafe fn scalar(p: *const u8) -> f32;

    /// Converts 16 stored elements (not packed) to scalars.
    ///
    /// # Safety
    /// 16 elements are readable and 16 scalars are writable.
    unsafe fn to_scalars(s: S, from: *const u8, to: *mut u8);

    /// Writes 16 weights as scalars.
    ///
    /// # Safety
    /// 16 scalars are writable.
    unsafe fn store_scalars(s: S, to: *mut u8, weights: S::V);
}

/// float32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct F32;

impl<S: Simd> Operand<S> for F32 {
    type Line = S::V;

    const DTYPE: Dtype = Dtype::F32;
    const PACK: usize = 1;
    const SCALAR_BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(s: S, p: *const u8) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { s.load(p.cast()) }
    }

    #[inline(always)]
    unsafe fn multiply_add(s: S, acc: S::V, line: S::V, scalars: *const u8) -> S::V {
        // SAFETY: the caller's contract.
        let scalar = unsafe { scalars.cast::<f32>().read() };
        s.fma(s.splat(scalar), line, acc)
    }

    #[inline(always)]
    unsafe fn load_step(s: S, p: *const u8, _step: usize) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { s.load(p.cast()) }
    }

    #[inline(always)]
    unsafe fn scalar(p: *const u8) -> f32 {
        // SAFETY: the caller's contract.
        unsafe { p.cast::<f32>().read() }
    }

    #[inline(always)]
    unsafe fn to_scalars(s: S, from: *const u8, to: *mut u8) {
        // SAFETY: the caller's contract.
        unsafe { s.store(to.cast(), s.load(from.cast())) }
    }

    #[inline(always)]
    unsafe fn store_scalars(s: S, to: *mut u8, weights: S::V) {
        // SAFETY: the caller's contract.
        unsafe { s.store(to.cast(), weights) }
    }
}

/// float16, widened as it is loaded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct F16;

impl<S: Simd> Operand<S> for F16 {
    type Line = S::V;

    const DTYPE: Dtype = Dtype::F16;
    const PACK: usize = 1;
    const SCALAR_BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(s: S, p: *const u8) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { s.load_f16(p.cast()) }
    }

    #[inline(always)]
    unsafe fn multiply_add(s: S, acc: S::V, line: S::V, scalars: *const u8) -> S::V {
        // SAFETY: the caller's contract.
        let scalar = unsafe { scalars.cast::<f32>().read() };
        s.fma(s.splat(scalar), line, acc)
    }

    #[inline(always)]
    unsafe fn load_step(s: S, p: *const u8, _step: usize) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { s.load_f16(p.cast()) }
    }

    #[inline(always)]
    unsafe fn scalar(p: *const u8) -> f32 {
        // SAFETY: the caller's contract.
        unsafe { p.cast::<f32>().read() }
    }

    #[inline(always)]
    unsafe fn to_scalars(s: S, from: *const u8, to: *mut u8) {
        // SAFETY: the caller's contract.
        unsafe { s.store(to.cast(), s.load_f16(from.cast())) }
    }

    #[inline(always)]
    unsafe fn store_scalars(s: S, to: *mut u8, weights: S::V) {
        // SAFETY: the caller's contract.
        unsafe { s.store(to.cast(), weights) }
    }
}

/// Pairs of bfloat16, widened as they are loaded; two multiplications a line.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bf16;

impl<S: Simd> Operand<S> for Bf16 {
    type Line = (S::V, S::V);

    const DTYPE: Dtype = Dtype::Bf16;
    const PACK: usize = 2;
    const SCALAR_BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(s: S, p: *const u8) -> (S::V, S::V) {
        // SAFETY: the caller's contract.
        unsafe { s.load_bf16_pairs(p.cast()) }
    }

    #[inline(always)]
    unsafe fn multiply_add(s: S, acc: S::V, line: (S::V, S::V), scalars: *const u8) -> S::V {
        // SAFETY: the caller's contract.
        let [first, second] = unsafe { scalars.cast::<[f32; 2]>().read() };
        s.fma(s.splat(second), line.1, s.fma(s.splat(first), line.0, acc))
    }

    #[inline(always)]
    unsafe fn load_step(s: S, p: *const u8, step: usize) -> S::V {
        // SAFETY: the caller's contract.
        let (first, second) = unsafe { s.load_bf16_pairs(p.cast()) };
        if step == 0 { first } else { second }
    }

    #[inline(always)]
    unsafe fn scalar(p: *const u8) -> f32 {
        // SAFETY: the caller's contract.
        unsafe { p.cast::<f32>().read() }
    }

    #[inline(always)]
    unsafe fn to_scalars(s: S, from: *const u8, to: *mut u8) {
        // SAFETY: the caller's contract.
        unsafe { s.store(to.cast(), s.load_bf16(from.cast())) }
    }

    #[inline(always)]
    unsafe fn store_scalars(s: S, to: *mut u8, weights: S::V) {
        // SAFETY: the caller's contract.
        unsafe { s.store(to.cast(), weights) }
    }
}
