//! PyO3 bindings of the `chunkcache` crate: they convert, release the GIL and map errors.

use pyo3::prelude::*;

/// The compiled half of the `chunkcache` package.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
