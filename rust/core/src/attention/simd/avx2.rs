//! AVX2 with FMA and F16C: a vector is two registers.

use std::arch::x86_64::*;

use super::Simd;

/// The proof that the processor has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// The proof.
    ///
    /// # Safety
    /// The processor has AVX2, FMA and F16C.
    #[inline(always)]
    pub(crate) const unsafe fn new() -> Self {
        Self(())
    }
}

type V = [__m256; 2];

/// Evaluates intrinsics.
macro_rules! op {
    ($e:expr) => {
        // SAFETY: `self` is the proof that the processor has the instructions; what is read or
        // written is the caller's contract.
        unsafe { $e }
    };
}

const ROUND: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// bfloat16 of 8 floats, one in each 32-bit lane: to nearest even; NaN stays NaN, and gets its
/// quiet bit.
#[inline(always)]
unsafe fn round_bf16(a: __m256) -> __m256i {
    // SAFETY: the caller is the proof that the processor has the instructions.
    unsafe {
        let bits = _mm256_castps_si256(a);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(a, a));
        let quiet = _mm256_or_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(0x40));
        _mm256_blendv_epi8(rounded, quiet, nan)
    }
}

impl Simd for Avx2 {
    type V = V;

    const TILE_ROWS: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        op!([_mm256_set1_ps(x); 2])
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        op!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        op!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        op!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        op!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        op!([_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])])
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        op!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }

    #[inline(always)]
    fn round(self, a: V) -> V {
        op!([_mm256_round_ps::<ROUND>(a[0]), _mm256_round_ps::<ROUND>(a[1])])
    }

    #[inline(always)]
    fn scale_by_pow2(self, a: V, n: V) -> V {
        let half = |a: __m256, n: __m256| {
            op!({
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent));
                let normal = _mm256_cmp_ps::<_CMP_NLT_UQ>(n, _mm256_set1_ps(-126.0));
                _mm256_and_ps(_mm256_mul_ps(a, power), normal)
            })
        };
        [half(a[0], n[0]), half(a[1], n[1])]
    }

    #[inline(always)]
    fn select_lt(self, a: V, b: V, x: V, y: V) -> V {
        op!([
            _mm256_blendv_ps(y[0], x[0], _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])),
            _mm256_blendv_ps(y[1], x[1], _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])),
        ])
    }

    #[inline(always)]
    fn any_gt(self, a: V, b: V) -> bool {
        op!({
            let low = _mm256_cmp_ps::<_CMP_GT_OQ>(a[0], b[0]);
            let high = _mm256_cmp_ps::<_CMP_GT_OQ>(a[1], b[1]);
            _mm256_movemask_ps(_mm256_or_ps(low, high)) != 0
        })
    }

    #[inline(always)]
    fn keep_lanes(self, a: V, begin: usize, end: usize, other: V) -> V {
        op!({
            let lanes = [
                _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15),
            ];
            let mut out = other;
            for half in 0..2 {
                let begun = _mm256_cmpgt_epi32(lanes[half], _mm256_set1_epi32(begin as i32 - 1));
                let ended = _mm256_cmpgt_epi32(_mm256_set1_epi32(end as i32), lanes[half]);
                let kept = _mm256_castsi256_ps(_mm256_and_si256(begun, ended));
                out[half] = _mm256_blendv_ps(other[half], a[half], kept);
            }
            out
        })
    }

    #[inline(always)]
    fn reduce_max(self, a: V) -> f32 {
        op!({
            let m = _mm256_max_ps(a[0], a[1]);
            let m = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps::<1>(m));
            let m = _mm_max_ps(m, _mm_movehl_ps(m, m));
            _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps::<1>(m, m)))
        })
    }

    #[inline(always)]
    fn reduce_add(self, a: V) -> f32 {
        op!({
            let m = _mm256_add_ps(a[0], a[1]);
            let m = _mm_add_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps::<1>(m));
            let m = _mm_add_ps(m, _mm_movehl_ps(m, m));
            _mm_cvtss_f32(_mm_add_ss(m, _mm_shuffle_ps::<1>(m, m)))
        })
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        op!([_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))])
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: V) {
        op!({
            _mm256_storeu_ps(p, a[0]);
            _mm256_storeu_ps(p.add(8), a[1]);
        })
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> V {
        op!([
            _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
        ])
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, a: V) {
        op!({
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a[0]));
            _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a[1]));
        })
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> V {
        let half = |p: *const u16| {
            op!({
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            })
        };
        [half(p), half(p.wrapping_add(8))]
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, a: V) {
        op!({
            let packed = _mm256_packus_epi32(round_bf16(a[0]), round_bf16(a[1]));
            // The pack works within halves of a register: put the quarters in order.
            _mm256_storeu_si256(p.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        })
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u16) -> (V, V) {
        op!({
            let pairs = [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(16).cast())];
            let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let first = |x: __m256i| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x));
            let second = |x: __m256i| _mm256_castsi256_ps(_mm256_and_si256(x, upper));
            ([first(pairs[0]), first(pairs[1])], [second(pairs[0]), second(pairs[1])])
        })
    }

    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        op!(_mm_prefetch::<_MM_HINT_T1>(p.cast()))
    }
}
