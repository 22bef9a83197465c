//! Arguments from Python, by their names: sizes, handles, salts and times.
//!
//! Each function reads the argument that it is named for, with an error that names it.

use std::time::Duration;

use chunkcache::error::{Error, Result};
use chunkcache::tree::{PinHandle, SeqHandle};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::errors::to_python;
use crate::tokens::Tokens;

type Object<'a, 'py> = &'a Bound<'py, PyAny>;

const HANDLE: &str = "a handle that the tree gave out";

/// Maps an error of the core.
pub trait IntoPython<T> {
    /// The value, or the Python exception that stands for the error.
    fn into_python(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> IntoPython<T> for Result<T> {
    fn into_python(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| to_python(py, error))
    }
}

/// A value as an error message shows it: a number as itself, anything else by its type.
pub fn described(object: Object<'_, '_>) -> String {
    let class = object.get_type().name().map_or_else(|_| "object".into(), |name| name.to_string());
    match object.str() {
        Ok(text) if class == "int" || class == "float" => text.to_string(),
        _ => class,
    }
}

/// The error for an argument that is something else than allowed.
pub fn refused(name: &str, object: Object<'_, '_>, allowed: impl Into<String>) -> PyErr {
    to_python(object.py(), Error::invalid(name, described(object), allowed))
}

fn size(name: &str, object: Object<'_, '_>) -> PyResult<usize> {
    object.extract().map_err(|_| refused(name, object, "an integer of 0 or more"))
}

fn handle(name: &str, object: Object<'_, '_>) -> PyResult<u64> {
    object.extract().map_err(|_| refused(name, object, HANDLE))
}

/// Every item of an iterable, read with its index in the name.
fn each<'py, T>(
    name: &str,
    object: Object<'_, 'py>,
    allowed: &str,
    read: impl Fn(&str, &Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    let items = object.try_iter().map_err(|_| refused(name, object, allowed))?.enumerate();
    items.map(|(i, item)| read(&format!("{name}[{i}]"), &item?)).collect()
}

/// Chunks in the pool.
pub fn capacity(object: Object<'_, '_>) -> PyResult<usize> {
    size("capacity", object)
}

/// Chunks in the pool, if given.
pub fn optional_capacity(object: Object<'_, '_>) -> PyResult<Option<usize>> {
    (!object.is_none()).then(|| capacity(object)).transpose()
}

/// Bytes of K and V, if given.
pub fn capacity_bytes(object: Object<'_, '_>) -> PyResult<Option<usize>> {
    (!object.is_none()).then(|| size("capacity_bytes", object)).transpose()
}

/// Threads, if given.
pub fn num_threads(object: Object<'_, '_>) -> PyResult<Option<usize>> {
    (!object.is_none()).then(|| size("num_threads", object)).transpose()
}

/// Whether equal prefixes are stored once.
pub fn enable_prefix_sharing(object: Object<'_, '_>) -> PyResult<bool> {
    object.extract().map_err(|_| refused("enable_prefix_sharing", object, "True or False"))
}

/// Tokens per chunk.
pub fn chunk_size(object: Object<'_, '_>) -> PyResult<usize> {
    size("chunk_size", object)
}

/// Tokens per page.
pub fn page_size(object: Object<'_, '_>) -> PyResult<u32> {
    object.extract().map_err(|_| refused("page_size", object, "an integer from 1 to 4294967295"))
}

/// Layers of a model.
pub fn num_layers(object: Object<'_, '_>) -> PyResult<usize> {
    size("num_layers", object)
}

/// K/V heads of a layer.
pub fn num_kv_heads(object: Object<'_, '_>) -> PyResult<usize> {
    size("num_kv_heads", object)
}

/// Elements of one head's key or value.
pub fn head_dim(object: Object<'_, '_>) -> PyResult<usize> {
    size("head_dim", object)
}

/// A layer of a model.
pub fn layer(object: Object<'_, '_>) -> PyResult<usize> {
    size("layer", object)
}

/// Chunks to evict.
pub fn num_chunks(object: Object<'_, '_>) -> PyResult<usize> {
    size("num_chunks", object)
}

/// A sequence's new length.
pub fn num_tokens(object: Object<'_, '_>) -> PyResult<usize> {
    size("num_tokens", object)
}

/// A position among computed tokens.
pub fn num_computed_tokens(object: Object<'_, '_>) -> PyResult<usize> {
    size("num_computed_tokens", object)
}

/// A number of tokens for each sequence.
pub fn num_tokens_each(object: Object<'_, '_>) -> PyResult<Vec<u32>> {
    let read = |name: &str, item: Object<'_, '_>| {
        item.extract().map_err(|_| refused(name, item, "an integer from 0 to 4294967295"))
    };
    each("num_tokens", object, "a sequence of integers, one for each sequence", read)
}

/// First token position.
pub fn begin(object: Object<'_, '_>) -> PyResult<usize> {
    size("begin", object)
}

/// Rows of q for each entry of a batch, if given.
pub fn qo_indptr(object: Object<'_, '_>) -> PyResult<Option<Tokens>> {
    (!object.is_none()).then(|| Tokens::from_python("qo_indptr", object)).transpose()
}

/// A sequence.
pub fn seq(object: Object<'_, '_>) -> PyResult<SeqHandle> {
    handle("seq", object).map(Into::into)
}

/// Several sequences.
pub fn seqs(object: Object<'_, '_>) -> PyResult<Vec<SeqHandle>> {
    let read = |name: &str, item: Object<'_, '_>| handle(name, item).map(Into::into);
    each("seqs", object, "a sequence of handles", read)
}

/// The sequences of a step; None is a padding row.
pub fn batch(object: Object<'_, '_>) -> PyResult<Vec<Option<SeqHandle>>> {
    let read = |name: &str, item: Object<'_, '_>| {
        (!item.is_none()).then(|| handle(name, item).map(Into::into)).transpose()
    };
    each("batch", object, "a sequence of handles or None", read)
}

/// A pin.
pub fn pin(object: Object<'_, '_>) -> PyResult<PinHandle> {
    handle("pin", object).map(Into::into)
}

/// A prompt, or the next tokens of sequences.
pub fn tokens(object: Object<'_, '_>) -> PyResult<Tokens> {
    Tokens::from_python("tokens", object)
}

/// The next token of a sequence, or its next tokens.
pub fn token_or_tokens(object: Object<'_, '_>) -> PyResult<Tokens> {
    Tokens::one_or_many("tokens", object)
}

/// The name of a namespace.
pub fn cache_salt<'a>(object: Object<'a, '_>) -> PyResult<&'a str> {
    let allowed = "a str without lone surrogates";
    let text = object.cast::<PyString>().map_err(|_| refused("cache_salt", object, allowed))?;
    text.to_str().map_err(|_| refused("cache_salt", object, allowed))
}

/// A time to live in seconds; None is without end.
pub fn ttl(object: Object<'_, '_>) -> PyResult<Option<Duration>> {
    if object.is_none() {
        return Ok(None);
    }
    let refused = || refused("ttl", object, "a number of seconds of 0 or more, or None");
    let seconds: f64 = object.extract().map_err(|_| refused())?;
    Duration::try_from_secs_f64(seconds).map(Some).map_err(|_| refused())
}
