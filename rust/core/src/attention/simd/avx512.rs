//! AVX-512: a vector is one register.

use std::arch::x86_64::*;

use super::operand::Operand;
use super::{LANES, Simd};
use crate::kv::Dtype;

/// The proof that the processor has AVX-512 F, BW, DQ and VL.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// The proof.
    ///
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ and VL.
    #[inline(always)]
    pub(crate) const unsafe fn new() -> Self {
        Self(())
    }
}

type V = __m512;

/// Evaluates intrinsics on registers, which touch no memory.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe { $e }
    };
}

const ROUND: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

impl Simd for Avx512 {
    type V = V;

    const TILE_ROWS: usize = 8;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        op!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        op!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        op!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        op!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        op!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        op!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        op!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn round(self, a: V) -> V {
        op!(_mm512_roundscale_ps::<ROUND>(a))
    }

    #[inline(always)]
    fn scale_by_pow2(self, a: V, n: V) -> V {
        op!({
            let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(n, _mm512_set1_ps(-126.0));
            _mm512_maskz_scalef_ps(normal, a, n)
        })
    }

    #[inline(always)]
    fn select_lt(self, a: V, b: V, x: V, y: V) -> V {
        op!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x))
    }

    #[inline(always)]
    fn any_gt(self, a: V, b: V) -> bool {
        op!(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b)) != 0
    }

    #[inline(always)]
    fn keep_lanes(self, a: V, begin: usize, end: usize, other: V) -> V {
        let mask = (((1u32 << end) - 1) & !((1u32 << begin) - 1)) as u16;
        op!(_mm512_mask_blend_ps(mask, other, a))
    }

    #[inline(always)]
    fn reduce_max(self, a: V) -> f32 {
        op!(_mm512_reduce_max_ps(a))
    }

    #[inline(always)]
    fn reduce_add(self, a: V) -> f32 {
        op!(_mm512_reduce_add_ps(a))
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        op!(_mm512_loadu_ps(p))
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: V) {
        op!(_mm512_storeu_ps(p, a))
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> V {
        op!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, a: V) {
        op!(_mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a)))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> V {
        op!({
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        })
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, a: V) {
        op!({
            let bits = _mm512_castps_si512(a);
            // Round to nearest even; NaN stays NaN, and gets its quiet bit.
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a);
            let quiet = _mm512_or_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(0x40));
            let rounded = _mm512_mask_blend_epi32(nan, rounded, quiet);
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(rounded));
        })
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u16) -> (V, V) {
        op!({
            let pairs = _mm512_loadu_si512(p.cast());
            let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(second))
        })
    }

    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        op!(_mm_prefetch::<_MM_HINT_T1>(p.cast()))
    }
}

/// Pairs of bfloat16 as they are, for the dot-product instruction; the other side is bfloat16 too.
///
/// Chosen by entry points with `avx512bf16` only.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bf16Dot;

impl Operand<Avx512> for Bf16Dot {
    type Line = __m512i;

    const DTYPE: Dtype = Dtype::Bf16;
    const PACK: usize = 2;
    const SCALAR_BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(_s: Avx512, p: *const u8) -> __m512i {
        // SAFETY: the caller's contract.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    #[inline(always)]
    unsafe fn multiply_add(_s: Avx512, acc: V, line: __m512i, scalars: *const u8) -> V {
        // SAFETY: the caller's contract; the bits of a register of bfloat16 are plain.
        unsafe {
            let pair = _mm512_set1_epi32(scalars.cast::<i32>().read_unaligned());
            _mm512_dpbf16_ps(
                acc,
                std::mem::transmute::<__m512i, __m512bh>(line),
                std::mem::transmute::<__m512i, __m512bh>(pair),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_step(s: Avx512, p: *const u8, step: usize) -> V {
        // SAFETY: the caller's contract.
        let (first, second) = unsafe { s.load_bf16_pairs(p.cast()) };
        if step == 0 { first } else { second }
    }

    #[inline(always)]
    unsafe fn scalar(p: *const u8) -> f32 {
        // SAFETY: the caller's contract.
        let bits = unsafe { p.cast::<u16>().read() };
        f32::from_bits(u32::from(bits) << 16)
    }

    #[inline(always)]
    unsafe fn to_scalars(_s: Avx512, from: *const u8, to: *mut u8) {
        // SAFETY: the caller's contract.
        unsafe { to.copy_from_nonoverlapping(from, LANES * 2) }
    }

    #[inline(always)]
    unsafe fn store_scalars(_s: Avx512, to: *mut u8, weights: V) {
        // SAFETY: the caller's contract.
        unsafe {
            let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(weights));
            _mm256_storeu_si256(to.cast(), rounded);
        }
    }
}
