//! Plain Rust, for every processor; also what the other two are compared with.

use half::{bf16, f16};

use super::{LANES, Simd};

/// Arrays of 16 floats, left to the compiler.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

type V = [f32; LANES];

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    let mut out = a;
    for (x, y) in out.iter_mut().zip(b) {
        *x = f(*x, y);
    }
    out
}

impl Simd for Portable {
    type V = V;

    const TILE_ROWS: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; LANES]
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        zip(a, b, |x, y| x + y)
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        zip(a, b, |x, y| x - y)
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        zip(a, b, |x, y| x * y)
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        zip(a, b, |x, y| x / y)
    }

    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        self.add(self.mul(a, b), c)
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        zip(a, b, |x, y| if x > y { x } else { y })
    }

    #[inline(always)]
    fn round(self, a: V) -> V {
        // Adding 1.5 * 2^23 leaves no bits for a fraction; right for |x| < 2^22.
        zip(a, a, |x, _| (x + 12_582_912.0) - 12_582_912.0)
    }

    #[inline(always)]
    fn scale_by_pow2(self, a: V, n: V) -> V {
        zip(a, n, |x, n| {
            let power = f32::from_bits((((n as i32) + 127) as u32) << 23);
            if n < -126.0 { 0.0 } else { x * power }
        })
    }

    #[inline(always)]
    fn select_lt(self, a: V, b: V, x: V, y: V) -> V {
        let mut out = y;
        for lane in 0..LANES {
            if a[lane] < b[lane] {
                out[lane] = x[lane];
            }
        }
        out
    }

    #[inline(always)]
    fn any_gt(self, a: V, b: V) -> bool {
        let mut any = false;
        for lane in 0..LANES {
            any |= a[lane] > b[lane];
        }
        any
    }

    #[inline(always)]
    fn keep_lanes(self, a: V, begin: usize, end: usize, other: V) -> V {
        let mut out = other;
        out[begin..end].copy_from_slice(&a[begin..end]);
        out
    }

    #[inline(always)]
    fn reduce_max(self, a: V) -> f32 {
        a.iter().fold(f32::NEG_INFINITY, |x, &y| if y > x { y } else { x })
    }

    #[inline(always)]
    fn reduce_add(self, a: V) -> f32 {
        a.iter().sum()
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        // SAFETY: the caller's contract.
        unsafe { p.cast::<V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, a: V) {
        // SAFETY: the caller's contract.
        unsafe { p.cast::<V>().write_unaligned(a) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> V {
        // SAFETY: the caller's contract.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|x| f16::from_bits(x).to_f32())
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, a: V) {
        let bits = a.map(|x| f16::from_f32(x).to_bits());
        // SAFETY: the caller's contract.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(bits) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> V {
        // SAFETY: the caller's contract.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|x| f32::from_bits(u32::from(x) << 16))
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, a: V) {
        let bits = a.map(|x| bf16::from_f32(x).to_bits());
        // SAFETY: the caller's contract.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(bits) }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u16) -> (V, V) {
        // SAFETY: the caller's contract.
        let bits = unsafe { p.cast::<[[u16; 2]; LANES]>().read_unaligned() };
        (
            bits.map(|[x, _]| f32::from_bits(u32::from(x) << 16)),
            bits.map(|[_, x]| f32::from_bits(u32::from(x) << 16)),
        )
    }

    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}
}
