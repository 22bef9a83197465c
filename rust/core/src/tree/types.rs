//! What the tree's operations take and give.

use std::fmt;
use std::time::Duration;

use super::clock::Clock;
use crate::pool::ChunkId;

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u64);

        impl $name {
            pub(super) fn new(slot: u32, generation: u32) -> Self {
                Self(u64::from(generation) << 32 | u64::from(slot))
            }

            pub(super) fn slot(self) -> u32 {
                self.0 as u32
            }

            pub(super) fn generation(self) -> u32 {
                (self.0 >> 32) as u32
            }

            /// The handle as a plain number.
            pub fn as_u64(self) -> u64 {
                self.0
            }
        }

        impl From<u64> for $name {
            fn from(number: u64) -> Self {
                Self(number)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

handle! {
    /// A live sequence. Any number may be made into a handle: one that was not given out by
    /// [`insert`](super::PrefixTree::insert) or [`fork`](super::PrefixTree::fork), or whose
    /// sequence was removed, is an error wherever it is used.
    SeqHandle
}

handle! {
    /// A pinned prefix.
    PinHandle
}

/// A step that was begun and not yet committed or aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepId(pub(super) u64);

impl StepId {
    /// The step as a plain number; later steps have larger ones.
    pub fn as_u64(self) -> u64 {
        self.0
    }
}

/// How a tree is made.
#[derive(Debug, Clone)]
pub struct TreeConfig {
    /// Chunks in the pool.
    pub capacity: usize,
    /// Tokens per chunk, 1 or more.
    pub chunk_size: usize,
    /// Whether equal prefixes are stored once. Without it, inserts match nothing, nothing is kept
    /// after `remove`, and `fork` is refused.
    pub enable_prefix_sharing: bool,
    /// K/V bytes of one chunk over all layers, for the statistics; 0 for a tree without K/V.
    pub chunk_bytes: u64,
    /// The clock that ends pins with a time to live.
    pub clock: Clock,
}

impl TreeConfig {
    /// A tree of `capacity` chunks of `chunk_size` tokens that shares prefixes.
    pub fn new(capacity: usize, chunk_size: usize) -> Self {
        Self {
            capacity,
            chunk_size,
            enable_prefix_sharing: true,
            chunk_bytes: 0,
            clock: Clock::monotonic(),
        }
    }
}

/// What of a prompt is cached: the answer of `match_prefix`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PrefixMatch {
    /// Tokens in full chunks that an insert would share, written or not; a multiple of the chunk.
    pub num_tokens: usize,
    /// How many of `num_tokens` are written; a prefix of them.
    pub num_filled: usize,
    /// Further tokens, in the chunk where the prompt diverges or ends, that an insert would copy.
    pub num_partial: usize,
    /// The matched chunks.
    pub chunk_ids: Vec<ChunkId>,
}

/// The K/V of a chunk's first tokens that its owner must copy, in every layer, right after the call
/// that reports it and before any other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CopyChunk {
    /// The chunk to read.
    pub src: ChunkId,
    /// The chunk to write.
    pub dst: ChunkId,
    /// How many tokens, from the chunk's first.
    pub num_tokens: usize,
}

/// A new sequence: the answer of `insert`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inserted {
    /// Its handle.
    pub seq: SeqHandle,
    /// Tokens in full chunks that it shares, written or not.
    pub num_matched_tokens: usize,
    /// Further tokens whose K/V is copied from a chunk with an equal head.
    pub num_copied_tokens: usize,
    /// Where its own work starts: the cached tokens, but at most all tokens except the last, since
    /// the last one's query is always needed.
    pub num_computed_tokens: usize,
    /// The copy to make, if `num_copied_tokens` is not zero.
    pub copy: Option<CopyChunk>,
}

impl Inserted {
    /// Tokens that need not be computed for their K/V: matched and copied.
    pub fn cached_tokens(&self) -> usize {
        self.num_matched_tokens + self.num_copied_tokens
    }
}

/// The answer of `fork`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forked {
    /// The new sequence.
    pub seq: SeqHandle,
    /// The copy to make, if the source's last chunk is partial and written.
    pub copy: Option<CopyChunk>,
    /// Whether the source's partial chunk is not written yet. The new sequence cannot be planned
    /// until the commit that writes it, which reports the copy.
    pub waiting: bool,
}

/// Unwritten tokens `[begin, end)` that a sequence must now write, because their writer has left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Inherited {
    /// The sequence that inherits; its `num_computed_tokens` is at most `begin`.
    pub seq: SeqHandle,
    /// First token position.
    pub begin: usize,
    /// One past the last.
    pub end: usize,
}

/// The answer of `truncate`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Truncated {
    /// The copy to make, if the cut went through a shared chunk.
    pub copy: Option<CopyChunk>,
    /// Whether the copy has to wait for an open step, as after a fork.
    pub waiting: bool,
    /// Who writes what the sequence would have written beyond the cut.
    pub inherited: Vec<Inherited>,
}

/// The answer of `commit`, `commit_step` and `abort_step`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Committed {
    /// Who inherits the work of sequences that were removed while their step was open.
    pub inherited: Vec<Inherited>,
    /// The copies that waiting forks waited for, to be made in this order.
    pub copies: Vec<CopyChunk>,
}

/// One sequence of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepRow {
    /// The sequence.
    pub seq: SeqHandle,
    /// Position of its first query.
    pub start: u32,
    /// Number of queries.
    pub len: u32,
    /// Leading queries whose K/V this sequence does not write (slot -1): it is written already, or
    /// another sequence writes it.
    pub num_cached_rows: u32,
}

/// A step that was begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// What `commit_step` and `abort_step` take.
    pub id: StepId,
    /// Its rows, in the caller's order.
    pub rows: Vec<StepRow>,
}

/// A pinned prefix: the answer of `pin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pinned {
    /// What `unpin` takes.
    pub pin: PinHandle,
    /// Tokens that are kept: the written full chunks of the prompt.
    pub num_tokens: usize,
    /// When it ends, on the tree's clock.
    pub expires_at: Option<Duration>,
}

/// A sequence's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceInfo {
    /// Tokens, reserved slots included.
    pub num_tokens: usize,
    /// Tokens whose ids are known: all but the reserved slots.
    pub num_known_tokens: usize,
    /// The next position to compute; moved by commits.
    pub num_computed_tokens: usize,
    /// The next position to plan: `num_computed_tokens` plus what open steps compute.
    pub num_scheduled_tokens: usize,
    /// Whether a step of one query can begin now.
    pub is_ready: bool,
    /// Whether it is a fork that waits for its source's partial chunk.
    pub is_waiting: bool,
}

/// A run of chunks, stable while none of its chunks was given back: for equal keys, the chunk at
/// an index of the run stays the same, and the run only gets longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunKey {
    /// The run's slot.
    pub index: u32,
    /// Changes whenever the run gives a chunk back.
    pub generation: u64,
}

/// A node of the tree: a run of chunks without a branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub(super) u32);

impl SegmentId {
    /// The segment's slot: small, and used again after the segment is gone.
    pub fn index(self) -> u32 {
        self.0
    }
}

/// What the plan reads of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentView<'a> {
    /// The segment before it on the path; `None` at the first one.
    pub parent: Option<SegmentId>,
    /// The run that holds its chunks.
    pub run: RunKey,
    /// Index in the run of its first chunk.
    pub first_chunk: u32,
    /// Position of its first token.
    pub start_pos: u32,
    /// Tokens; the last chunk may be partial.
    pub num_tokens: u32,
    /// Sequences that pass through or end here.
    pub num_sequences: u32,
    /// Its chunks.
    pub chunk_ids: &'a [ChunkId],
}
