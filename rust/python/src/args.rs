//! Arguments from Python, by their names: sizes, handles, salts and times.
//!
//! Each function reads the argument that it is named for, with an error that names it.

use std::fmt::{self, Display};
use std::ops::RangeInclusive;
use std::time::Duration;

use chunkcache::attention::Workers;
use chunkcache::error::{Error, Result};
use chunkcache::kv::MAX_DIM;
use chunkcache::pool::MAX_CAPACITY;
use chunkcache::tree::{PinHandle, SeqHandle};
use pyo3::exceptions::{PyException, PyOverflowError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};

use crate::described::{described, is_bag};
use crate::errors::to_python;
use crate::tokens::Tokens;

type Object<'a, 'py> = &'a Bound<'py, PyAny>;

const HANDLE: &str = "a handle that the tree gave out";

/// Tokens per chunk or page, at most.
const MAX_CHUNK_SIZE: usize = 1 << 20;

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

/// An item of an argument, as errors name it.
struct Item<'a>(&'a str, usize);

impl Display for Item<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.0, self.1)
    }
}

/// The error for an argument that is something else than allowed.
pub fn refused(name: impl Display, object: Object<'_, '_>, allowed: impl Into<String>) -> PyErr {
    to_python(object.py(), Error::invalid(name.to_string(), described(object), allowed))
}

/// Whatever Python counts as an integer, but for True and False; None for anything else, and for
/// what 64 bits do not hold.
fn number(object: Object<'_, '_>) -> PyResult<Option<i128>> {
    if object.is_instance_of::<PyBool>() {
        return Ok(None);
    }
    let py = object.py();
    match object.extract::<i64>() {
        Ok(number) => Ok(Some(number.into())),
        Err(error) if error.is_instance_of::<PyOverflowError>(py) => {
            Ok(object.extract::<u64>().ok().map(Into::into))
        }
        // Whatever its `__index__` raises, but for an interrupt.
        Err(error) if error.is_instance_of::<PyException>(py) => Ok(None),
        Err(error) => Err(error),
    }
}

/// An integer within a range, which the error states unless `allowed` says it better.
fn integer<T: TryFrom<i128> + Into<i128> + Copy>(
    name: impl Display,
    object: Object<'_, '_>,
    range: RangeInclusive<T>,
    allowed: Option<&str>,
) -> PyResult<T> {
    let (min, max) = ((*range.start()).into(), (*range.end()).into());
    let found = number(object)?.filter(|found| (min..=max).contains(found));
    found.and_then(|found| T::try_from(found).ok()).ok_or_else(|| {
        let range = || format!("an integer from {min} to {max}");
        refused(&name, object, allowed.map_or_else(range, str::to_owned))
    })
}

/// A size within a range.
fn size(name: &str, object: Object<'_, '_>, range: RangeInclusive<usize>) -> PyResult<usize> {
    let range = *range.start() as u64..=*range.end() as u64;
    integer(name, object, range, None).map(|size| size as usize)
}

fn handle(name: impl Display, object: Object<'_, '_>) -> PyResult<u64> {
    integer(name, object, 0..=u64::MAX, Some(HANDLE))
}

/// Every item of an iterable, read with its index in the name.
fn each<'py, T>(
    name: &str,
    object: Object<'_, 'py>,
    allowed: &str,
    read: impl Fn(Item<'_>, &Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    if is_bag(object)? {
        return Err(refused(name, object, allowed));
    }
    let items = object.try_iter().map_err(|_| refused(name, object, allowed))?.enumerate();
    items.map(|(i, item)| read(Item(name, i), &item?)).collect()
}

/// Chunks in the pool.
pub fn capacity(object: Object<'_, '_>) -> PyResult<usize> {
    size("capacity", object, 1..=MAX_CAPACITY)
}

/// Chunks in the pool, if given.
pub fn optional_capacity(object: Object<'_, '_>) -> PyResult<Option<usize>> {
    (!object.is_none()).then(|| capacity(object)).transpose()
}

/// Bytes of K and V for at least one chunk of `chunk_bytes`, as whole chunks.
pub fn chunks_of_bytes(object: Object<'_, '_>, chunk_bytes: usize) -> PyResult<usize> {
    let max = MAX_CAPACITY.min(isize::MAX as usize / chunk_bytes) * chunk_bytes;
    size("capacity_bytes", object, chunk_bytes..=max).map(|bytes| bytes / chunk_bytes)
}

/// Threads, if given.
pub fn num_threads(object: Object<'_, '_>) -> PyResult<Option<usize>> {
    let range = 1..=Workers::MAX_THREADS;
    (!object.is_none()).then(|| size("num_threads", object, range)).transpose()
}

/// Whether equal prefixes are stored once.
pub fn enable_prefix_sharing(object: Object<'_, '_>) -> PyResult<bool> {
    object.extract().map_err(|_| refused("enable_prefix_sharing", object, "True or False"))
}

/// Tokens per chunk of a tree.
pub fn chunk_size(object: Object<'_, '_>) -> PyResult<usize> {
    size("chunk_size", object, 1..=MAX_CHUNK_SIZE)
}

/// Tokens per chunk of a tree with K/V.
pub fn kv_chunk_size(object: Object<'_, '_>) -> PyResult<usize> {
    let found = integer("chunk_size", object, 16..=128_u8, Some("16 to 128, a multiple of 16"))?;
    Ok(found.into())
}

/// Tokens per page.
pub fn page_size(object: Object<'_, '_>) -> PyResult<u32> {
    size("page_size", object, 1..=MAX_CHUNK_SIZE).map(|size| size as u32)
}

/// Layers of a model.
pub fn num_layers(object: Object<'_, '_>) -> PyResult<usize> {
    size("num_layers", object, 1..=MAX_DIM)
}

/// K/V heads of a layer.
pub fn num_kv_heads(object: Object<'_, '_>) -> PyResult<usize> {
    size("num_kv_heads", object, 1..=MAX_DIM)
}

/// Elements of one head's key or value.
pub fn head_dim(object: Object<'_, '_>) -> PyResult<usize> {
    size("head_dim", object, 1..=MAX_DIM)
}

/// A layer of a model of `num_layers`.
pub fn layer(object: Object<'_, '_>, num_layers: usize) -> PyResult<usize> {
    size("layer", object, 0..=num_layers - 1)
}

/// How many keys before its own a query sees.
pub fn window_left(object: Object<'_, '_>) -> PyResult<i32> {
    let allowed = format!("an integer from -1 (infinite) to {}", i32::MAX);
    integer("window_left", object, -1..=i32::MAX, Some(&allowed))
}

/// Chunks to evict.
pub fn num_chunks(object: Object<'_, '_>) -> PyResult<usize> {
    size("num_chunks", object, 0..=usize::MAX)
}

/// A sequence's new length.
pub fn num_tokens(object: Object<'_, '_>) -> PyResult<usize> {
    let allowed = Some("an integer from 1 to the sequence's tokens");
    integer("num_tokens", object, 1..=u64::MAX, allowed).map(|tokens| tokens as usize)
}

/// A position among computed tokens.
pub fn num_computed_tokens(object: Object<'_, '_>) -> PyResult<usize> {
    let allowed = Some("an integer from 0 to the sequence's computed tokens");
    let found = integer("num_computed_tokens", object, 0..=u64::MAX, allowed)?;
    Ok(found as usize)
}

/// A number of tokens for each sequence.
pub fn num_tokens_each(object: Object<'_, '_>) -> PyResult<Vec<u32>> {
    let allowed = Some("an integer from 1 to the tokens that the sequence has left to compute");
    let read = |name: Item<'_>, item: Object<'_, '_>| integer(name, item, 1..=u32::MAX, allowed);
    each("num_tokens", object, "a sequence of integers, one for each sequence", read)
}

/// First token position, which the caller in Python has checked.
pub fn begin(object: Object<'_, '_>) -> PyResult<usize> {
    size("begin", object, 0..=usize::MAX)
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
    let read = |name: Item<'_>, item: Object<'_, '_>| handle(name, item).map(Into::into);
    each("seqs", object, "a sequence of handles", read)
}

/// The sequences of a step; None is a padding row.
pub fn batch(object: Object<'_, '_>) -> PyResult<Vec<Option<SeqHandle>>> {
    let read = |name: Item<'_>, item: Object<'_, '_>| {
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

/// A real number; None for anything else, True and False included.
pub fn real(object: Object<'_, '_>) -> Option<f64> {
    if object.is_instance_of::<PyBool>() {
        return None;
    }
    object.extract().ok()
}

/// A time to live in seconds; None is without end.
pub fn ttl(object: Object<'_, '_>) -> PyResult<Option<Duration>> {
    if object.is_none() {
        return Ok(None);
    }
    let time = real(object).and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let allowed = "a number of seconds from 0 to 1.8e19, or None for a pin without end";
    time.map(Some).ok_or_else(|| refused("ttl", object, allowed))
}
