//! Chunk pool: ids of fixed-size chunks, and the address arithmetic of the memory behind them.

mod layout;

pub use layout::KvLayout;

use crate::error::{Error, Result};

/// Chunks that a pool may have at most: ids are of 32 bits, and one is left to say "none".
pub const MAX_CAPACITY: usize = u32::MAX as usize - 1;

/// A chunk's number in its pool. Other engines call a chunk a page (FlashInfer, SGLang) or a
/// block (vLLM).
pub type ChunkId = u32;

/// Hands out chunk ids below a fixed capacity; the last one given back is the next one handed out,
/// so that recently used memory is used again while it is warm.
///
/// ```
/// use chunkcache::pool::ChunkPool;
///
/// let mut pool = ChunkPool::new(2)?;
/// let first = pool.allocate().unwrap();
/// pool.allocate().unwrap();
/// assert_eq!(pool.allocate(), None);
/// pool.free(first);
/// assert_eq!(pool.allocate(), Some(first));
/// # Ok::<(), chunkcache::error::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ChunkPool {
    capacity: u32,
    /// Ids from here on were never handed out, so that a large pool costs nothing up front.
    next_unused: u32,
    returned: Vec<ChunkId>,
}

impl ChunkPool {
    /// A pool of `capacity` chunks, all free.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if `capacity` is zero or does not leave room for ids of 32 bits.
    pub fn new(capacity: usize) -> Result<Self> {
        if !(1..=MAX_CAPACITY).contains(&capacity) {
            let allowed = format!("1 to {MAX_CAPACITY} chunks");
            return Err(Error::invalid("capacity", capacity, allowed));
        }
        Ok(Self { capacity: capacity as u32, next_unused: 0, returned: Vec::new() })
    }

    /// Number of chunks, free or not.
    pub fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// Number of free chunks.
    pub fn num_free(&self) -> usize {
        (self.capacity - self.next_unused) as usize + self.returned.len()
    }

    /// Takes one chunk, if one is free. O(1).
    pub fn allocate(&mut self) -> Option<ChunkId> {
        if let Some(id) = self.returned.pop() {
            return Some(id);
        }
        if self.next_unused == self.capacity {
            return None;
        }
        self.next_unused += 1;
        Some(self.next_unused - 1)
    }

    /// Takes `count` chunks onto the end of `out`, or none.
    ///
    /// # Errors
    /// [`Error::OutOfChunks`] if fewer than `count` are free; then nothing changes.
    pub fn allocate_many(&mut self, count: usize, out: &mut Vec<ChunkId>) -> Result<()> {
        if count > self.num_free() {
            return Err(Error::OutOfChunks {
                needed: count,
                free: self.num_free(),
                evictable: 0,
                capacity: self.capacity(),
            });
        }
        let reused = count.min(self.returned.len());
        out.extend(self.returned.drain(self.returned.len() - reused..).rev());
        let fresh = (count - reused) as u32;
        out.extend(self.next_unused..self.next_unused + fresh);
        self.next_unused += fresh;
        Ok(())
    }

    /// Gives one chunk back. O(1).
    ///
    /// The caller owns the chunk: giving one back twice is a fault of the caller that
    /// [`PrefixTree::check_invariants`](crate::tree::PrefixTree::check_invariants) reports.
    pub fn free(&mut self, chunk: ChunkId) {
        debug_assert!(chunk < self.next_unused);
        self.returned.push(chunk);
    }

    /// Ids that were given back and not handed out again.
    pub(crate) fn returned(&self) -> &[ChunkId] {
        &self.returned
    }

    /// One past the largest id that was ever handed out.
    pub(crate) fn next_unused(&self) -> ChunkId {
        self.next_unused
    }
}
