//! The vector operations that the kernels are written in, and their three implementations.
//!
//! A value of an implementing type is the proof that the processor has its instructions: only
//! [`Isa`](crate::attention::Isa) dispatch makes one. Every method is `#[inline(always)]`, so that
//! it becomes one instruction inside the `#[target_feature]` entry points of
//! [`dispatch`](super::kernel::dispatch); called elsewhere it would be a function call.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod math;
pub(crate) mod operand;
pub(crate) mod portable;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Vectors of 16 float32 lanes.
pub(crate) trait Simd: Copy {
    /// A vector.
    type V: Copy;

    /// Query rows that a register tile holds: 1, 2, 4 or 8.
    const TILE_ROWS: usize;

    /// `x` in all lanes.
    fn splat(self, x: f32) -> Self::V;
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the processor can.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The nearest integer.
    fn round(self, a: Self::V) -> Self::V;
    /// `a * 2^n` for integers n of -126 to 127; 0 where n is less.
    fn scale_by_pow2(self, a: Self::V, n: Self::V) -> Self::V;
    /// `x` where `a < b`, else `y`.
    fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// Whether `a > b` in any lane.
    fn any_gt(self, a: Self::V, b: Self::V) -> bool;
    /// `a` in lanes `begin..end`, `other` in the rest.
    fn keep_lanes(self, a: Self::V, begin: usize, end: usize, other: Self::V) -> Self::V;
    /// The largest lane.
    fn reduce_max(self, a: Self::V) -> f32;
    /// The sum of the lanes, in an order of its own.
    fn reduce_add(self, a: Self::V) -> f32;

    /// 16 float32.
    ///
    /// # Safety
    /// They are readable; any alignment.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// Writes 16 float32.
    ///
    /// # Safety
    /// They are writable; any alignment.
    unsafe fn store(self, p: *mut f32, a: Self::V);
    /// 16 float16, widened.
    ///
    /// # Safety
    /// They are readable; any alignment.
    unsafe fn load_f16(self, p: *const u16) -> Self::V;
    /// Writes 16 float16, rounded to nearest even.
    ///
    /// # Safety
    /// They are writable; any alignment.
    unsafe fn store_f16(self, p: *mut u16, a: Self::V);
    /// 16 bfloat16, widened.
    ///
    /// # Safety
    /// They are readable; any alignment.
    unsafe fn load_bf16(self, p: *const u16) -> Self::V;
    /// Writes 16 bfloat16, rounded to nearest even.
    ///
    /// # Safety
    /// They are writable; any alignment.
    unsafe fn store_bf16(self, p: *mut u16, a: Self::V);
    /// 16 pairs of bfloat16, widened: the first of each pair, and the second.
    ///
    /// # Safety
    /// They are readable; any alignment.
    unsafe fn load_bf16_pairs(self, p: *const u16) -> (Self::V, Self::V);
    /// Asks for the line at `p` to be brought to the second-level cache; any address.
    fn prefetch(self, p: *const u8);
}
