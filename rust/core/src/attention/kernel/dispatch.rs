//! From an instruction set, chosen at run time, to code compiled for it.
//!
//! Functions with `#[target_feature]` are not inlined into plain ones, so the choice is made once
//! for a whole task, and everything below is inlined into the entry point.

use super::scratch::Scratch;
use super::task::{Shared, Task, run};
use crate::attention::Isa;
use crate::attention::simd::Simd;
use crate::attention::simd::operand::{Bf16, F16, F32};
use crate::attention::simd::portable::Portable;
use crate::kv::Dtype;

#[cfg(target_arch = "x86_64")]
use crate::attention::simd::{avx2::Avx2, avx512::Avx512, avx512::Bf16Dot};

/// A computation over vectors of any instruction set. Implementations are `#[inline(always)]`.
pub(crate) trait Run {
    /// The computation.
    fn run<S: Simd>(self, s: S);
}

/// Runs a computation on an instruction set that the processor has.
pub(crate) fn on<R: Run>(isa: Isa, computation: R) {
    debug_assert!(isa.is_available());
    match isa {
        Isa::Portable => computation.run(Portable),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, as whoever chose the set has checked.
        Isa::Avx2 => unsafe { on_avx2(computation) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 | Isa::Avx512Bf16 => unsafe { on_avx512(computation) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => computation.run(Portable),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn on_avx2<R: Run>(computation: R) {
    // SAFETY: this function is entered on processors with these instructions only.
    computation.run(unsafe { Avx2::new() });
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn on_avx512<R: Run>(computation: R) {
    // SAFETY: this function is entered on processors with these instructions only.
    computation.run(unsafe { Avx512::new() });
}

/// Computes a task on an instruction set that the processor has.
pub(crate) fn run_task(isa: Isa, shared: &Shared<'_>, task: &Task<'_>, scratch: &mut Scratch) {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512Bf16 && shared.q.dtype() == Dtype::Bf16 {
        // SAFETY: the processor has the instructions, as whoever chose the set has checked.
        unsafe { run_bf16_dot(shared, task, scratch) };
        return;
    }
    on(isa, RunTask { shared, task, scratch });
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn run_bf16_dot(shared: &Shared<'_>, task: &Task<'_>, scratch: &mut Scratch) {
    // SAFETY: this function is entered on processors with these instructions only.
    run::<_, Bf16Dot>(unsafe { Avx512::new() }, shared, task, scratch);
}

struct RunTask<'a> {
    shared: &'a Shared<'a>,
    task: &'a Task<'a>,
    scratch: &'a mut Scratch,
}

impl Run for RunTask<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.shared.q.dtype() {
            Dtype::F32 => run::<S, F32>(s, self.shared, self.task, self.scratch),
            Dtype::F16 => run::<S, F16>(s, self.shared, self.task, self.scratch),
            Dtype::Bf16 => run::<S, Bf16>(s, self.shared, self.task, self.scratch),
        }
    }
}
