//! Token ids and handles from Python: read in place where an array's dtype allows.

use std::fmt::Display;
use std::ptr::NonNull;

use chunkcache::error::Error;
use pyo3::buffer::{ElementType, PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::PyException;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyInt, PyList, PyTuple};

use crate::args::refused;
use crate::described::is_bag;
use crate::errors::to_python;
use crate::numpy::uint32_array;

const ALLOWED_TOKEN: &str = "an integer from 0 to 4294967295";
const ALLOWED_TOKENS: &str =
    "a sequence of integers or a one-dimensional array of uint32, int32 or int64";

/// Token ids: in the caller's array if that is contiguous uint32 or int32, else converted.
pub enum Tokens {
    /// A contiguous array of uint32.
    Unsigned(PyBuffer<u32>),
    /// A contiguous array of int32, none of them negative.
    Signed(PyBuffer<i32>),
    /// Anything else.
    Converted(Vec<u32>),
}

impl Tokens {
    /// Reads the argument `name`, any sequence of integers.
    pub fn from_python(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
            return from_iterable(name, object).map(Self::Converted);
        }
        if object.is_instance_of::<PyBytes>() || object.is_instance_of::<PyByteArray>() {
            return Err(refused(name, object, ALLOWED_TOKENS));
        }
        let py = object.py();
        let Ok(buffer) = PyUntypedBuffer::get(object) else {
            if is_bag(object)? {
                return Err(refused(name, object, ALLOWED_TOKENS));
            }
            // Tensors and series have no buffer, but an array, in place where they can.
            if object.hasattr(intern!(py, "__array__"))? {
                let array = object.call_method0(intern!(py, "__array__"));
                let array = array.map_err(|_| refused(name, object, ALLOWED_TOKENS))?;
                if PyUntypedBuffer::get(&array).is_ok() {
                    return Self::from_python(name, &array);
                }
            }
            return from_iterable(name, object).map(Self::Converted);
        };
        if buffer.dimensions() != 1 {
            let given = format!("an array of {} dimensions", buffer.dimensions());
            return Err(to_python(py, Error::invalid(name, given, ALLOWED_TOKENS)));
        }
        // An explicit byte order is left to the iteration below.
        let native = !matches!(buffer.format().to_bytes().first(), Some(b'<' | b'>' | b'!'));
        match ElementType::from_format(buffer.format()) {
            ElementType::UnsignedInteger { bytes: 4 } if native => {
                let buffer = buffer.into_typed::<u32>()?;
                if buffer.as_slice_ptr().is_some() {
                    return Ok(Self::Unsigned(buffer));
                }
                buffer.to_vec(py).map(Self::Converted)
            }
            ElementType::SignedInteger { bytes: 4 } if native => {
                let buffer = buffer.into_typed::<i32>()?;
                if let Some(ids) = buffer.as_slice_ptr() {
                    // SAFETY: the export keeps the array in place, and the GIL is held.
                    let ids = unsafe { ids.as_ref() };
                    return match ids.iter().position(|&id| id < 0) {
                        None => Ok(Self::Signed(buffer)),
                        Some(i) => Err(not_an_id(py, name, i, ids[i])),
                    };
                }
                in_range(py, name, buffer.to_vec(py)?).map(Self::Converted)
            }
            ElementType::SignedInteger { bytes: 8 } if native => {
                let ids = buffer.into_typed::<i64>()?.to_vec(py)?;
                in_range(py, name, ids).map(Self::Converted)
            }
            _ => from_iterable(name, object).map(Self::Converted),
        }
    }

    /// Reads the argument `name`, an integer or any sequence of them.
    pub fn one_or_many(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        match object.len() {
            Ok(_) => Self::from_python(name, object),
            // Also arrays and tensors of no dimension, which have a length only in name.
            Err(_) => integer(name, object).map(|id| Self::Converted(vec![id])),
        }
    }

    /// The ids.
    ///
    /// A thread that writes into an array while it is an argument changes what is read, as it would
    /// for numpy.
    pub fn as_slice(&self) -> &[u32] {
        match self {
            // SAFETY: the export keeps the array in place; the pointer covers its elements.
            Self::Unsigned(buffer) => unsafe { in_place(buffer.as_slice_ptr()) },
            // SAFETY: as above, and a non-negative i32 has the bits of the same u32.
            Self::Signed(buffer) => unsafe { in_place(buffer.as_slice_ptr()) },
            Self::Converted(ids) => ids,
        }
    }
}

/// The slice behind a pointer to 32-bit elements, empty where there is none.
///
/// # Safety
/// The elements must be readable for `'a`, and their bits valid ids.
unsafe fn in_place<'a, T>(ids: Option<NonNull<[T]>>) -> &'a [u32] {
    const { assert!(size_of::<T>() == size_of::<u32>()) };
    // SAFETY: the caller's.
    ids.map_or(&[], |ids| unsafe { std::slice::from_raw_parts(ids.as_ptr().cast(), ids.len()) })
}

/// A 32-bit id from any object that Python counts as an integer; errors start with `name`.
fn integer(name: impl Display, object: &Bound<'_, PyAny>) -> PyResult<u32> {
    if object.is_instance_of::<PyBool>() {
        return Err(refused(name, object, ALLOWED_TOKEN));
    }
    object.extract::<u32>().map_err(|error| {
        let py = object.py();
        if error.is_instance_of::<PyException>(py) {
            refused(name, object, ALLOWED_TOKEN)
        } else {
            error
        }
    })
}

fn from_iterable(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let length = object.len().unwrap_or(0);
    if length > u32::MAX as usize {
        let given = format!("{length} integers");
        return Err(to_python(object.py(), Error::invalid(name, given, "at most 4294967295")));
    }
    // What an object says of its length may be wrong: room for more is made as items come.
    let mut ids = Vec::with_capacity(length.min(1 << 16));
    for item in object.try_iter().map_err(|_| refused(name, object, ALLOWED_TOKENS))? {
        let item = item?;
        match item.extract::<u32>() {
            // True and False count as 1 and 0.
            Ok(id) if id > 1 || !item.is_instance_of::<PyBool>() => ids.push(id),
            _ => ids.push(integer(format!("{name}[{}]", ids.len()), &item)?),
        }
    }
    Ok(ids)
}

fn in_range<T>(py: Python<'_>, name: &str, ids: Vec<T>) -> PyResult<Vec<u32>>
where
    T: Copy + Display + TryInto<u32>,
{
    let checked = |(i, &id): (usize, &T)| id.try_into().map_err(|_| not_an_id(py, name, i, id));
    ids.iter().enumerate().map(checked).collect()
}

fn not_an_id(py: Python<'_>, name: &str, index: usize, id: impl Display) -> PyErr {
    let argument = format!("{name}[{index}]");
    to_python(py, Error::invalid(argument, id, ALLOWED_TOKEN))
}

/// A list of token ids as a uint32 array; none if it has anything but integers from 0 to below
/// `vocab_size`.
///
/// It only tells that something is wrong: the caller finds out what, and says so in its own words.
#[pyfunction]
#[pyo3(signature = (token_ids, vocab_size))]
pub fn token_array<'py>(
    py: Python<'py>,
    token_ids: &Bound<'py, PyList>,
    vocab_size: u32,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let mut ids = Vec::with_capacity(token_ids.len());
    for item in token_ids.iter() {
        match item.extract::<u32>() {
            Ok(id) if id < vocab_size && item.is_exact_instance_of::<PyInt>() => ids.push(id),
            _ => return Ok(None),
        }
    }
    uint32_array(py, &ids).map(Some)
}
