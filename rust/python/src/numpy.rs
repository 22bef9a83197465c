//! New numpy arrays.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyByteArray;

fn array<'py>(py: Python<'py>, bytes: &[u8], dtype: &str) -> PyResult<Bound<'py, PyAny>> {
    static FROM_BUFFER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    // A bytearray, unlike bytes, makes an array that can be written to, as torch asks of one.
    let from_buffer = FROM_BUFFER.import(py, "numpy", "frombuffer")?;
    from_buffer.call1((PyByteArray::new(py, bytes), dtype))
}

/// A new uint32 array.
pub fn uint32_array<'py>(py: Python<'py>, values: &[u32]) -> PyResult<Bound<'py, PyAny>> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    array(py, &bytes, "uint32")
}

/// A new int64 array.
pub fn int64_array<'py>(py: Python<'py>, values: &[i64]) -> PyResult<Bound<'py, PyAny>> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    array(py, &bytes, "int64")
}
