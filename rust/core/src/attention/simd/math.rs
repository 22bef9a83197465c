//! Elementary functions over vectors.

use super::Simd;

/// Minimax polynomial of 2^f over [-1/2, 1/2], constant first: relative error 8e-8, about the
/// rounding of float32.
const EXP2: [f32; 6] =
    [1.000_000_1, 0.693_146_94, 0.240_221_2, 0.055_507_13, 0.009_675_541, 0.001_327_647_1];

/// 2^x, 0 where x is less than -126 (also for -inf).
#[inline(always)]
pub(crate) fn exp2<S: Simd>(s: S, x: S::V) -> S::V {
    // NaN is the second operand, and stays.
    let x = s.max(s.splat(-128.0), x);
    let n = s.round(x);
    let f = s.sub(x, n);
    let mut sum = s.splat(EXP2[EXP2.len() - 1]);
    for c in EXP2[..EXP2.len() - 1].iter().rev() {
        sum = s.fma(sum, f, s.splat(*c));
    }
    s.scale_by_pow2(sum, n)
}

/// Hyperbolic tangent, after Cephes `tanhf`: an odd polynomial near 0, 1 - 2/(e^2x + 1) elsewhere.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    const ODD: [f32; 5] =
        [-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];
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
