//! The one place where errors of the core become Python exceptions.

use chunkcache::error::Error;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// The class `name` of `chunkcache.errors`, with its arguments, as a raised exception.
///
/// The classes are plain Python, so that they can inherit from two bases; they are looked up when
/// first raised, which keeps the extension importable on its own.
fn raise<A>(py: Python<'_>, class: &PyOnceLock<Py<PyType>>, name: &str, arguments: A) -> PyErr
where
    A: pyo3::PyErrArguments + Send + Sync + 'static,
{
    match class.import(py, "chunkcache.errors", name) {
        Ok(class) => PyErr::from_type(class.clone(), arguments),
        Err(error) => error,
    }
}

/// The Python exception that stands for an error of the core.
pub fn to_python(py: Python<'_>, error: Error) -> PyErr {
    static OUT_OF_CHUNKS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static UNKNOWN_SEQUENCE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static INVALID_CONFIG: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static STALE_PLAN: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static OTHER: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let message = error.to_string();
    match error {
        Error::OutOfChunks { needed, free, evictable, .. } => {
            let arguments = (message, needed, free, evictable);
            raise(py, &OUT_OF_CHUNKS, "OutOfChunksError", arguments)
        }
        Error::UnknownSequence { .. } => {
            raise(py, &UNKNOWN_SEQUENCE, "UnknownSequenceError", message)
        }
        Error::InvalidConfig { .. } => raise(py, &INVALID_CONFIG, "InvalidConfigError", message),
        Error::ClosedPlan { .. } | Error::StalePlan { .. } | Error::AbandonedPlan { .. } => {
            raise(py, &STALE_PLAN, "StalePlanError", message)
        }
        _ => raise(py, &OTHER, "ChunkCacheError", message),
    }
}
