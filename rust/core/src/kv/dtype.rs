//! The element types of K, V, queries and outputs.

use std::fmt;

use half::{bf16, f16};

/// An element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    Bf16,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn itemsize(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        })
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A Rust type that is the element of a [`Dtype`]. Every bit pattern is a value of it.
pub trait Element: Copy + Send + Sync + sealed::Sealed + 'static {
    /// The element type.
    const DTYPE: Dtype;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}
