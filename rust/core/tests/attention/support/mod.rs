//! Trees of sequences, their K/V in every form, and plain attention in float64.

mod case;
mod reference;
mod tree;

pub use case::{Case, Layout};
pub use reference::{Scores, assert_close, attention};
pub use tree::{Tables, Tree, forest};

use chunkcache::kv::Dtype;

/// All element types.
pub const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// Numbers that look random: a 64-bit linear congruential generator (Knuth's MMIX).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// A number of 0 to 2^32 - 1.
    pub fn bits(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// About normal: the sum of four uniform numbers, with variance 1.
    pub fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.bits() as f32 / 4_294_967_296.0 - 0.5).sum();
        sum * 3.0f32.sqrt()
    }

    /// `len` normal numbers.
    pub fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }
}
