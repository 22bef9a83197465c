//! Prefix tree: a forest of chunk runs, one root per namespace, that stores equal prompt prefixes
//! once (PAKV).
//!
//! Logically a node is one chunk. Runs of chunks without a branch are stored together as a
//! *segment*, their tokens contiguous, so that matching is a memory compare; a segment is a window
//! on an append-only *run*, so that splitting and merging take constant time. Nodes name each
//! other by index: nothing recurses, whatever the depth.
//!
//! ```
//! use chunkcache::tree::{PrefixTree, TreeConfig};
//!
//! let mut tree = PrefixTree::new(TreeConfig::new(100, 4))?;
//! let first = tree.insert(&[1, 2, 3, 4, 5, 6], b"")?;
//! tree.commit(&[(first.seq, 6)])?;
//! // The second prompt shares the full chunk, and copies the equal head of the next one.
//! let second = tree.insert(&[1, 2, 3, 4, 5, 9], b"")?;
//! assert_eq!((second.num_matched_tokens, second.num_copied_tokens), (4, 1));
//! tree.append(second.seq, &[10])?;
//! tree.remove(first.seq)?;
//! assert_eq!(tree.tokens(second.seq)?, [1, 2, 3, 4, 5, 9, 10]);
//! # Ok::<(), chunkcache::error::Error>(())
//! ```

mod append;
mod check;
mod clock;
mod dedup;
mod fork;
mod index;
mod insert;
mod journal;
mod leave;
mod lookup;
mod lru;
mod namespaces;
mod pin;
mod render;
mod rewind;
mod segment;
mod sequence;
mod slab;
mod stats;
mod step;
mod structure;
mod truncate;
mod types;
mod view;

pub use clock::{Clock, ManualClock};
pub use stats::TreeStats;
pub use step::StepWatch;
pub use types::{
    Committed, CopyChunk, Forked, Inherited, Inserted, PinHandle, Pinned, PrefixMatch, RunKey,
    SegmentId, SegmentView, SeqHandle, SequenceInfo, Step, StepId, StepRow, TreeConfig, Truncated,
};

use crate::error::{Error, Result};
use crate::pool::ChunkPool;
use index::ChildIndex;
use journal::Journal;
use lru::Lru;
use namespaces::Namespaces;
use pin::Pins;
use segment::{Accounts, Run, Segment};
use sequence::Sequences;
use slab::Slab;
use step::Steps;

/// Tokens per chunk at most.
pub(crate) const MAX_CHUNK_SIZE: u32 = 1 << 20;

/// One past the last token position: kernels count keys, to the end of the last chunk, in 31 bits.
pub(crate) const MAX_POSITIONS: u32 = i32::MAX as u32;

/// A prefix tree over a pool of chunks. It knows token ids and chunk ids; the K/V behind the chunks
/// belongs to somebody else, who makes the copies that operations report and says with
/// [`commit_step`](Self::commit_step) what is written.
///
/// Every operation is atomic: when it fails, nothing has changed.
#[derive(Debug, Clone)]
pub struct PrefixTree {
    chunk_size: u32,
    sharing: bool,
    chunk_bytes: u64,
    clock: Clock,
    pool: ChunkPool,
    runs: Slab<Run>,
    segments: Slab<Segment>,
    namespaces: Namespaces,
    index: ChildIndex,
    sequences: Sequences,
    lru: Lru,
    pins: Pins,
    steps: Steps,
    journal: Journal,
    accounts: Accounts,
    num_queries: u64,
    num_hits: u64,
    num_evicted: u64,
    /// Slots of the batch at hand, kept to spare an allocation.
    scratch: Vec<u32>,
}

impl PrefixTree {
    /// An empty tree.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if the capacity or the chunk size is out of range.
    pub fn new(config: TreeConfig) -> Result<Self> {
        let chunk_size = match u32::try_from(config.chunk_size) {
            Ok(size) if (1..=MAX_CHUNK_SIZE).contains(&size) => size,
            _ => {
                let allowed = format!("1 to {MAX_CHUNK_SIZE} tokens");
                return Err(Error::invalid("chunk_size", config.chunk_size, allowed));
            }
        };
        Ok(Self {
            chunk_size,
            sharing: config.enable_prefix_sharing,
            chunk_bytes: config.chunk_bytes,
            clock: config.clock,
            pool: ChunkPool::new(config.capacity)?,
            runs: Slab::new(),
            segments: Slab::new(),
            namespaces: Namespaces::new(),
            index: ChildIndex::default(),
            sequences: Sequences::default(),
            lru: Lru::default(),
            pins: Pins::default(),
            steps: Steps::default(),
            journal: Journal::default(),
            accounts: Accounts::default(),
            num_queries: 0,
            num_hits: 0,
            num_evicted: 0,
            scratch: Vec::new(),
        })
    }

    /// Tokens per chunk.
    pub fn chunk_size(&self) -> usize {
        self.chunk_size as usize
    }

    /// Tokens that a sequence may have at most.
    pub fn max_tokens(&self) -> usize {
        (MAX_POSITIONS - MAX_POSITIONS % self.chunk_size) as usize
    }

    /// Whether equal prefixes are stored once.
    pub fn enable_prefix_sharing(&self) -> bool {
        self.sharing
    }
}
