//! Large zeroed memory that is asked of the system lazily and in huge pages where it has them.

use std::ptr::NonNull;

/// The size of a huge page on x86-64 and of the usual one on aarch64, in bytes.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Bytes past the end of the usable part that may be read: kernels load whole vectors.
pub(crate) const SLACK: usize = 256;

/// A block of zeroed memory, aligned to a huge page. Not given back before drop.
#[derive(Debug)]
pub(crate) struct Slab {
    ptr: NonNull<u8>,
    size: usize,
}

// SAFETY: a slab owns its memory, and hands out nothing but addresses.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Slab {
    /// At least `bytes` bytes, all zero, with [`SLACK`] readable bytes behind them; `None` when
    /// the system refuses. Pages are taken when they are first written.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        let size = bytes.checked_add(SLACK)?.checked_next_multiple_of(HUGE_PAGE)?;
        Some(Self { ptr: sys::map(size)?, size })
    }

    /// The first byte.
    pub(crate) const fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: the block came from `map` with this size, and nobody else frees it.
        unsafe { sys::unmap(self.ptr, self.size) };
    }
}

#[cfg(unix)]
mod sys {
    use std::ptr::{self, NonNull};

    use super::HUGE_PAGE;

    pub(super) fn map(size: usize) -> Option<NonNull<u8>> {
        let reserved = size.checked_add(HUGE_PAGE)?;
        // SAFETY: an anonymous mapping at an address of the system's choice touches nothing.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                reserved,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return None;
        }
        let head = base.cast::<u8>().align_offset(HUGE_PAGE);
        let aligned = base.cast::<u8>().wrapping_add(head);
        let tail = HUGE_PAGE - head;
        // SAFETY: head and tail are the unaligned ends of the mapping just made, which is ours.
        unsafe {
            if head > 0 {
                libc::munmap(base, head);
            }
            if tail > 0 {
                libc::munmap(aligned.wrapping_add(size).cast(), tail);
            }
            // Advice only: without huge pages the memory works all the same.
            #[cfg(target_os = "linux")]
            libc::madvise(aligned.cast(), size, libc::MADV_HUGEPAGE);
        }
        NonNull::new(aligned)
    }

    /// # Safety
    /// `ptr` came from [`map`] with this size and is used by nobody.
    pub(super) unsafe fn unmap(ptr: NonNull<u8>, size: usize) {
        // SAFETY: the caller gives back what `map` made.
        unsafe { libc::munmap(ptr.as_ptr().cast(), size) };
    }
}

#[cfg(not(unix))]
mod sys {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::ptr::NonNull;

    use super::HUGE_PAGE;

    pub(super) fn map(size: usize) -> Option<NonNull<u8>> {
        let layout = Layout::from_size_align(size, HUGE_PAGE).ok()?;
        // SAFETY: a slab is never empty.
        NonNull::new(unsafe { alloc_zeroed(layout) })
    }

    /// # Safety
    /// `ptr` came from [`map`] with this size and is used by nobody.
    pub(super) unsafe fn unmap(ptr: NonNull<u8>, size: usize) {
        // SAFETY: the layout is the one that `map` used.
        unsafe { dealloc(ptr.as_ptr(), Layout::from_size_align_unchecked(size, HUGE_PAGE)) };
    }
}
