//! Strided views of `[tokens, heads, head_dim]` arrays whose innermost dimension is contiguous.

use std::marker::PhantomData;

use crate::error::{Error, Result};
use crate::kv::dtype::{Dtype, Element};

/// The shape and the strides of rows; strides are in elements, the innermost is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsLayout {
    /// Tokens.
    pub num_tokens: usize,
    /// Heads.
    pub num_heads: usize,
    /// Elements of one row.
    pub head_dim: usize,
    /// Elements from one token to the next.
    pub token_stride: usize,
    /// Elements from one head to the next.
    pub head_stride: usize,
}

impl RowsLayout {
    /// Rows without gaps.
    pub const fn contiguous(num_tokens: usize, num_heads: usize, head_dim: usize) -> Self {
        Self {
            num_tokens,
            num_heads,
            head_dim,
            token_stride: num_heads * head_dim,
            head_stride: head_dim,
        }
    }

    /// Elements from the first to one past the last that the layout touches.
    pub(crate) fn extent(&self) -> usize {
        if self.num_tokens == 0 || self.num_heads == 0 {
            return 0;
        }
        let tokens = (self.num_tokens - 1).saturating_mul(self.token_stride);
        let heads = (self.num_heads - 1).saturating_mul(self.head_stride);
        tokens.saturating_add(heads).saturating_add(self.head_dim)
    }
}

/// Read-only rows.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    ptr: *const u8,
    dtype: Dtype,
    layout: RowsLayout,
    data: PhantomData<&'a [u8]>,
}

// SAFETY: `Rows` is a shared borrow of plain numbers.
unsafe impl Send for Rows<'_> {}
// SAFETY: as above.
unsafe impl Sync for Rows<'_> {}

impl<'a> Rows<'a> {
    /// Rows in a slice.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] when the layout reaches past the slice.
    pub fn new<T: Element>(data: &'a [T], layout: RowsLayout) -> Result<Self> {
        check_extent(data.len(), &layout)?;
        // SAFETY: the extent lies in the slice, which is borrowed for 'a.
        Ok(unsafe { Self::from_raw(data.as_ptr().cast(), T::DTYPE, layout) })
    }

    /// Rows at an address.
    ///
    /// # Safety
    /// Every element that `layout` names must be readable at `ptr` and unchanged for `'a`.
    pub const unsafe fn from_raw(ptr: *const u8, dtype: Dtype, layout: RowsLayout) -> Self {
        Self { ptr, dtype, layout, data: PhantomData }
    }

    /// The element type.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The shape and the strides.
    pub const fn layout(&self) -> &RowsLayout {
        &self.layout
    }

    /// The address of the first row.
    pub(crate) const fn base(&self) -> *const u8 {
        self.ptr
    }

    /// The address of a row.
    pub(crate) fn row(&self, token: usize, head: usize) -> *const u8 {
        debug_assert!(token < self.layout.num_tokens && head < self.layout.num_heads);
        let elements = token * self.layout.token_stride + head * self.layout.head_stride;
        self.ptr.wrapping_add(elements * self.dtype.itemsize())
    }
}

/// Rows to write to. No two rows overlap.
#[derive(Debug)]
pub struct RowsMut<'a> {
    ptr: *mut u8,
    dtype: Dtype,
    layout: RowsLayout,
    data: PhantomData<&'a mut [u8]>,
}

// SAFETY: `RowsMut` is an exclusive borrow of plain numbers.
unsafe impl Send for RowsMut<'_> {}
// SAFETY: a shared `RowsMut` gives out addresses; whoever writes through them owns the row.
unsafe impl Sync for RowsMut<'_> {}

impl<'a> RowsMut<'a> {
    /// Rows in a slice.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] when the layout reaches past the slice, or rows overlap.
    pub fn new<T: Element>(data: &'a mut [T], layout: RowsLayout) -> Result<Self> {
        check_extent(data.len(), &layout)?;
        // SAFETY: the extent lies in the slice, which is borrowed for 'a.
        unsafe { Self::from_raw(data.as_mut_ptr().cast(), T::DTYPE, layout) }
    }

    /// Rows at an address.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] when rows overlap.
    ///
    /// # Safety
    /// Every element that `layout` names must be writable at `ptr`, by nobody else, for `'a`.
    pub unsafe fn from_raw(ptr: *mut u8, dtype: Dtype, layout: RowsLayout) -> Result<Self> {
        let RowsLayout { num_tokens, num_heads, head_dim, token_stride, head_stride } = layout;
        // (stride, extent) of the two outer dimensions, the inner of them first.
        let (inner, outer) = if head_stride <= token_stride {
            ((head_stride, num_heads), (token_stride, num_tokens))
        } else {
            ((token_stride, num_tokens), (head_stride, num_heads))
        };
        let inner_extent =
            inner.1.saturating_sub(1).saturating_mul(inner.0).saturating_add(head_dim);
        let overlap = (inner.1 > 1 && inner.0 < head_dim)
            || (inner.1 > 0 && outer.1 > 1 && outer.0 < inner_extent);
        if overlap {
            return Err(Error::invalid(
                "out",
                format!("strides ({token_stride}, {head_stride}, 1)"),
                "rows that do not overlap",
            ));
        }
        Ok(Self { ptr, dtype, layout, data: PhantomData })
    }

    /// The element type.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The shape and the strides.
    pub const fn layout(&self) -> &RowsLayout {
        &self.layout
    }

    /// The address of a row.
    pub(crate) fn row(&self, token: usize, head: usize) -> *mut u8 {
        debug_assert!(token < self.layout.num_tokens && head < self.layout.num_heads);
        let elements = token * self.layout.token_stride + head * self.layout.head_stride;
        self.ptr.wrapping_add(elements * self.dtype.itemsize())
    }
}

fn check_extent(len: usize, layout: &RowsLayout) -> Result<()> {
    if layout.extent() > len {
        return Err(Error::invalid(
            "rows",
            format!("{len} elements"),
            format!("at least the {} that {layout:?} names", layout.extent()),
        ));
    }
    Ok(())
}

/// Fails unless rows have the given heads, row length and element type.
pub(crate) fn check_rows(
    argument: &str,
    layout: &RowsLayout,
    dtype: Dtype,
    expected: (usize, usize, Dtype),
) -> Result<()> {
    let (num_heads, head_dim, expected_dtype) = expected;
    if (layout.num_heads, layout.head_dim) != (num_heads, head_dim) {
        return Err(Error::invalid(
            argument,
            format!("shape [{}, {}, {}]", layout.num_tokens, layout.num_heads, layout.head_dim),
            format!("[tokens, {num_heads}, {head_dim}]"),
        ));
    }
    if dtype != expected_dtype {
        return Err(Error::invalid(argument, dtype, format!("{expected_dtype}, as the K/V")));
    }
    Ok(())
}
