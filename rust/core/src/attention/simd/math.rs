//! Elementary functions over vectors.

use super::Simd;

/// Minimax polynomials of 2^f over [-1/2, 1/2], constant first, by relative error: degree 6
/// (2e-9, below the rounding of float32) and degree 3 (8e-5, below that of the 16-bit types).
const EXP2_DEGREE_6: [f32; 7] = [
    1.0,
    std::f32::consts::LN_2,
    0.240_226_46,
    0.055_503_286,
    0.009_618_489,
    0.001_339_993_1,
    0.000_153_458_12,
];
const EXP2_DEGREE_3: [f32; 4] = [0.999_928_06, 0.693_260_97, 0.242_611_13, 0.055_171_67];

/// 2^x, 0 where x is less than -126 (also for -inf).
#[inline(always)]
pub(crate) fn exp2<S: Simd>(s: S, x: S::V) -> S::V {
    exp2_by(s, x, &EXP2_DEGREE_6)
}

/// 2^x to a relative error of 1e-4, 0 where x is less than -126 (also for -inf).
#[inline(always)]
pub(crate) fn exp2_coarse<S: Simd>(s: S, x: S::V) -> S::V {
    exp2_by(s, x, &EXP2_DEGREE_3)
}

#[inline(always)]
fn exp2_by<S: Simd, const N: usize>(s: S, x: S::V, coefficients: &[f32; N]) -> S::V {
    let x = s.max(x, s.splat(-128.0));
    let n = s.round(x);
    let f = s.sub(x, n);
    let mut sum = s.splat(coefficients[N - 1]);
    for i in (0..N - 1).rev() {
        sum = s.fma(sum, f, s.splat(coefficients[i]));
    }
    s.scale_by_pow2(sum, n)
}

/// Hyperbolic tangent, after Cephes `tanhf`: an odd polynomial near 0, 1 - 2/(e^2x + 1) elsewhere.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    const ODD: [f32; 5] =
        [-5.704_99e-3, 2.063_908_9e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];
    let zero = s.splat(0.0);
    let magnitude = s.max(x, s.sub(zero, x));
    let z = s.mul(x, x);
    let mut p = s.splat(ODD[0]);
    for c in &ODD[1..] {
        p = s.fma(p, z, s.splat(*c));
    }
    let near = s.fma(s.mul(p, z), x, x);
    // e^2x overflows past 44; the quotient is 0 long before that.
    let double = s.mul(magnitude, s.splat(2.0 * std::f32::consts::LOG2_E));
    let double = s.select_lt(double, s.splat(60.0), double, s.splat(60.0));
    let e = exp2(s, double);
    let far = s.sub(s.splat(1.0), s.div(s.splat(2.0), s.add(e, s.splat(1.0))));
    let far = s.select_lt(x, zero, s.sub(zero, far), far);
    s.select_lt(magnitude, s.splat(0.625), near, far)
}
