//! PyO3 bindings of the `chunkcache` crate: they convert, release the GIL and map errors.

mod args;
mod arrays;
mod attention;
mod blocks;
mod described;
mod device;
mod errors;
mod host;
mod numpy;
mod options;
mod plan;
mod results;
mod shared;
mod tokens;
mod tree;
mod work;

use pyo3::prelude::*;

/// The compiled half of the `chunkcache` package.
#[pymodule]
mod _core {
    #[pymodule_export]
    use crate::attention::{
        available_isas, merge_states, partial_attention, plan_from_block_tables, plan_from_csr, run,
    };
    #[pymodule_export]
    use crate::blocks::PyBlockTablePlanner;
    #[pymodule_export]
    use crate::device::DeviceCache;
    #[pymodule_export]
    use crate::host::HostCache;
    #[pymodule_export]
    use crate::plan::PyPlan;
    #[pymodule_export]
    use crate::results::{
        ChunkCopy, Committed, ForkResult, Inherited, InsertResult, PrefixMatch, SequenceInfo,
        Stats, TruncateResult,
    };
    #[pymodule_export]
    use crate::tokens::token_array;
    #[pymodule_export]
    use crate::tree::PyPrefixTree;
    #[pymodule_export]
    use crate::work::cut_tables;

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
