//! Working memory of a task, kept from task to task.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// The alignment of all working memory: a cache line, and the widest vector.
const ALIGN: usize = 64;

/// Zeroed memory that grows and is aligned to a cache line.
#[derive(Debug)]
pub(crate) struct AlignedBuf {
    ptr: NonNull<u8>,
    size: usize,
}

// SAFETY: a buffer owns its memory, and hands out nothing but addresses.
unsafe impl Send for AlignedBuf {}

impl AlignedBuf {
    /// No memory yet.
    pub(crate) const fn new() -> Self {
        Self { ptr: NonNull::dangling(), size: 0 }
    }

    /// At least `bytes` bytes. What they hold is kept if they were there before, zero otherwise.
    pub(crate) fn get(&mut self, bytes: usize) -> *mut u8 {
        if bytes > self.size {
            let grown = bytes.next_multiple_of(ALIGN);
            let layout = Layout::from_size_align(grown, ALIGN).expect("working memory fits");
            // SAFETY: the size is not 0.
            let ptr = unsafe { alloc_zeroed(layout) };
            let Some(ptr) = NonNull::new(ptr) else { handle_alloc_error(layout) };
            self.free();
            (self.ptr, self.size) = (ptr, grown);
        }
        self.ptr.as_ptr()
    }

    fn free(&mut self) {
        if self.size > 0 {
            // SAFETY: the memory came from `get` with this layout.
            unsafe {
                dealloc(self.ptr.as_ptr(), Layout::from_size_align_unchecked(self.size, ALIGN));
            }
        }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        self.free();
    }
}

/// The working memory of one thread.
#[derive(Debug)]
pub(crate) struct Scratch {
    pub(super) queries: AlignedBuf,
    pub(super) outputs: AlignedBuf,
    pub(super) maxima: AlignedBuf,
    pub(super) sums: AlignedBuf,
    pub(super) scores: AlignedBuf,
    pub(super) packed: AlignedBuf,
    pub(super) bounds: Vec<super::task::Bounds>,
}

impl Scratch {
    /// No memory yet.
    pub(crate) const fn new() -> Self {
        Self {
            queries: AlignedBuf::new(),
            outputs: AlignedBuf::new(),
            maxima: AlignedBuf::new(),
            sums: AlignedBuf::new(),
            scores: AlignedBuf::new(),
            packed: AlignedBuf::new(),
            bounds: Vec::new(),
        }
    }
}
