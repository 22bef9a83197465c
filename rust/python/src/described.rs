//! How an error message shows the object that was given.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyFrozenSet, PyList, PyMapping, PySet, PyString,
    PyTuple, PyType,
};

/// Characters of a value that a message shows; of a longer one it gives the type.
const MAX_SHOWN: usize = 40;

/// A value as an error message shows it: numbers, short texts and None as they are, anything else by
/// its type.
pub fn described(object: &Bound<'_, PyAny>) -> String {
    let class = || object.get_type().name().map_or_else(|_| "object".into(), |n| n.to_string());
    let shown = if object.is_none() || object.is_instance_of::<PyBool>() {
        object.str()
    } else if object.is_instance_of::<PyString>() {
        object.repr()
    } else if object.is_instance_of::<PyFloat>() {
        // Also numpy's, whose repr names the type.
        object.str()
    } else {
        let index = object.call_method0(intern!(object.py(), "__index__"));
        index.and_then(|index| index.str())
    };
    let shown = shown.and_then(|text| text.extract::<String>());
    shown.ok().filter(|text| text.chars().count() <= MAX_SHOWN).unwrap_or_else(class)
}

/// Whether an object has items, but no order, or items that are parts of a text: what gives
/// integers when iterated over, and yet is no sequence of them.
pub fn is_bag(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
        return Ok(false);
    }
    if object.is_instance_of::<PyString>()
        || object.is_instance_of::<PyBytes>()
        || object.is_instance_of::<PyByteArray>()
        || object.is_instance_of::<PyDict>()
        || object.is_instance_of::<PySet>()
        || object.is_instance_of::<PyFrozenSet>()
        || object.cast::<PyMapping>().is_ok()
    {
        return Ok(true);
    }
    static SET: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    object.is_instance(SET.import(object.py(), "collections.abc", "Set")?)
}
