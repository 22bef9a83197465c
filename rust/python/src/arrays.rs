//! Arrays that `chunkcache._arrays` has checked and described, as rows of the core.

use std::slice;

use chunkcache::error::{Error, Result};
use chunkcache::kv::{Dtype, Rows, RowsLayout, RowsMut};
use pyo3::prelude::*;

use crate::errors::to_python;

/// `chunkcache._arrays.View`: address, dtype, shape and strides in elements.
///
/// The caller in Python holds a reference to the array for as long as the call lasts, so that the
/// address stays good while the GIL is released.
#[derive(Debug)]
pub struct View {
    address: usize,
    /// Element type.
    pub dtype: Dtype,
    /// Indices per dimension.
    pub shape: Vec<usize>,
    /// Elements from one index to the next, per dimension.
    pub strides: Vec<usize>,
}

impl<'py> FromPyObject<'_, 'py> for View {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (address, dtype, shape, strides) =
            object.extract::<(usize, String, Vec<usize>, Vec<usize>)>()?;
        let dtype = dtype_from_name("dtype", &dtype).map_err(|e| to_python(object.py(), e))?;
        Ok(Self { address, dtype, shape, strides })
    }
}

impl View {
    /// The address of the first element.
    pub fn as_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address)
    }

    /// Shape and strides of a `[tokens, heads, head_dim]` view.
    fn layout(&self) -> RowsLayout {
        RowsLayout {
            num_tokens: self.shape[0],
            num_heads: self.shape[1],
            head_dim: self.shape[2],
            token_stride: self.strides[0],
            head_stride: self.strides[1],
        }
    }

    /// Rows to read.
    ///
    /// # Safety
    /// The view is of three dimensions, and its array stays as it is for `'a`.
    pub unsafe fn rows<'a>(&self) -> Rows<'a> {
        // SAFETY: the caller's; the strides are those of the array.
        unsafe { Rows::from_raw(self.as_ptr(), self.dtype, self.layout()) }
    }

    /// Rows to write.
    ///
    /// # Safety
    /// The view is of three dimensions, and nobody else uses its array for `'a`.
    pub unsafe fn rows_mut<'a>(&self) -> Result<RowsMut<'a>> {
        // SAFETY: the caller's; the strides are those of the array.
        unsafe { RowsMut::from_raw(self.as_ptr(), self.dtype, self.layout()) }
    }

    /// Contiguous float32 elements to read.
    ///
    /// # Safety
    /// The view is contiguous and of float32, and its array stays as it is for `'a`.
    pub unsafe fn floats<'a>(&self) -> &'a [f32] {
        match self.shape.iter().product() {
            0 => &[],
            // SAFETY: the caller's.
            n => unsafe { slice::from_raw_parts(self.as_ptr().cast(), n) },
        }
    }

    /// Contiguous float32 elements to write.
    ///
    /// # Safety
    /// The view is contiguous and of float32, and nobody else uses its array for `'a`.
    pub unsafe fn floats_mut<'a>(&self) -> &'a mut [f32] {
        match self.shape.iter().product() {
            0 => &mut [],
            // SAFETY: the caller's.
            n => unsafe { slice::from_raw_parts_mut(self.as_ptr().cast(), n) },
        }
    }
}

/// The element type of a name.
pub fn dtype_from_name(argument: &str, name: &str) -> Result<Dtype> {
    match name {
        "float32" => Ok(Dtype::F32),
        "float16" => Ok(Dtype::F16),
        "bfloat16" => Ok(Dtype::Bf16),
        other => Err(Error::invalid(argument, other, "float32, float16 or bfloat16")),
    }
}
