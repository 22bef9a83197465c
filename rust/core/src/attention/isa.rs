//! The instruction sets that kernels exist for.

use std::fmt;

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 (F, BW, DQ, VL).
    Avx512,
    /// AVX-512 with bfloat16 dot products.
    Avx512Bf16,
}

impl Isa {
    /// All of them, the widest last.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16];

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            match self {
                Self::Portable => true,
                Self::Avx2 => avx2,
                Self::Avx512 => avx512,
                Self::Avx512Bf16 => avx512 && is_x86_feature_detected!("avx512bf16"),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }

    /// Those that this processor has, the widest last.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The fastest on this processor.
    ///
    /// On Intel's server cores a dot product of bfloat16 pairs takes as long as four multiply-adds
    /// of float32 (measured on Emerald Rapids: one in two cycles, against two a cycle), so that
    /// widening as a register is loaded is faster; on AMD's the dot product is.
    pub fn detect() -> Self {
        static FASTEST: std::sync::LazyLock<Isa> = std::sync::LazyLock::new(|| {
            let usable = |isa: &Isa| isa.is_available() && (*isa != Isa::Avx512Bf16 || !is_intel());
            Isa::ALL.into_iter().rfind(usable).unwrap_or(Isa::Portable)
        });
        *FASTEST
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512_bf16",
        })
    }
}

/// Whether the processor is Intel's, by the vendor string of CPUID leaf 0 (in EBX, EDX, ECX).
fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let leaf = std::arch::x86_64::__cpuid(0);
        let vendor = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
        vendor.as_flattened() == b"GenuineIntel"
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}
