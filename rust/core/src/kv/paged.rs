//! K/V pages that somebody else laid out: vLLM, SGLang, FlashInfer.

use std::marker::PhantomData;

use crate::error::{Error, Result};
use crate::kv::dtype::Dtype;
use crate::kv::layout::check_head_dim;

/// Strides of a paged tensor, in elements; the innermost (head_dim) is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageStrides {
    /// Elements from one page to the next.
    pub page: usize,
    /// Elements from one head to the next.
    pub head: usize,
    /// Elements from one token to the next.
    pub token: usize,
}

impl PageStrides {
    /// Pages `[page_size, num_kv_heads, head_dim]` without gaps.
    pub const fn nhd(page_size: usize, num_kv_heads: usize, head_dim: usize) -> Self {
        Self {
            page: page_size * num_kv_heads * head_dim,
            head: head_dim,
            token: num_kv_heads * head_dim,
        }
    }

    /// Pages `[num_kv_heads, page_size, head_dim]` without gaps.
    pub const fn hnd(page_size: usize, num_kv_heads: usize, head_dim: usize) -> Self {
        Self {
            page: page_size * num_kv_heads * head_dim,
            head: page_size * head_dim,
            token: head_dim,
        }
    }
}

/// The shape of a paged K/V cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagedShape {
    /// Pages.
    pub num_pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// K/V heads.
    pub num_kv_heads: usize,
    /// Elements of one head's key or value.
    pub head_dim: usize,
    /// Element type.
    pub dtype: Dtype,
}

/// One layer's pages of K and V in somebody else's memory, in any order of heads and tokens.
#[derive(Debug, Clone, Copy)]
pub struct PagedKv<'a> {
    k: *const u8,
    v: *const u8,
    shape: PagedShape,
    k_strides: PageStrides,
    v_strides: PageStrides,
    data: PhantomData<&'a [u8]>,
}

// SAFETY: `PagedKv` is a shared borrow of plain numbers.
unsafe impl Send for PagedKv<'_> {}
// SAFETY: as above.
unsafe impl Sync for PagedKv<'_> {}

impl PagedKv<'_> {
    /// Pages at two addresses.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for an empty page, no heads, or rows that are not a multiple of
    /// 16 bytes.
    ///
    /// # Safety
    /// For `'a`, every row `page * strides.page + head * strides.head + token * strides.token` of
    /// the shape must be readable, `head_dim` elements long, and unchanged.
    pub unsafe fn from_raw(
        k: *const u8,
        v: *const u8,
        shape: PagedShape,
        k_strides: PageStrides,
        v_strides: PageStrides,
    ) -> Result<Self> {
        check_head_dim(shape.head_dim, shape.dtype)?;
        for (argument, value) in
            [("page_size", shape.page_size), ("num_kv_heads", shape.num_kv_heads)]
        {
            if value == 0 {
                return Err(Error::invalid(argument, value, "1 or more"));
            }
        }
        Ok(Self { k, v, shape, k_strides, v_strides, data: PhantomData })
    }

    /// The shape.
    pub const fn shape(&self) -> &PagedShape {
        &self.shape
    }

    /// The address of one token's key.
    pub(crate) fn k_row(&self, page: u32, head: usize, token: usize) -> *const u8 {
        self.row(self.k, &self.k_strides, page, head, token)
    }

    /// The address of one token's value.
    pub(crate) fn v_row(&self, page: u32, head: usize, token: usize) -> *const u8 {
        self.row(self.v, &self.v_strides, page, head, token)
    }

    fn row(
        &self,
        base: *const u8,
        strides: &PageStrides,
        page: u32,
        head: usize,
        token: usize,
    ) -> *const u8 {
        let elements = page as usize * strides.page + head * strides.head + token * strides.token;
        base.wrapping_add(elements * self.shape.dtype.itemsize())
    }
}
