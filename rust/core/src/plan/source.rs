//! What the planner reads of the prefix tree, counted in chunks.

use crate::tree::{PrefixTree, RunKey, SegmentId, SeqHandle};

/// A segment of the tree: consecutive chunks of one run, at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    /// The segment before it on the path.
    pub parent: Option<SegmentId>,
    pub run: RunKey,
    /// Index in the run of its first chunk, and one past its last.
    pub begin: u32,
    pub end: u32,
    /// Number of chunks before it on its path.
    pub start_chunk: u32,
}

impl Window {
    pub fn of(tree: &PrefixTree, segment: SegmentId) -> Self {
        let view = tree.segment(segment);
        let chunk_size = tree.chunk_size() as u32;
        Self {
            parent: view.parent,
            run: view.run,
            begin: view.first_chunk,
            end: view.first_chunk + view.num_tokens.div_ceil(chunk_size),
            start_chunk: view.start_pos / chunk_size,
        }
    }

    /// Chunks of the path up to the end of the segment.
    pub fn end_chunk(&self) -> u32 {
        self.start_chunk + (self.end - self.begin)
    }
}

/// One sequence's part in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Query {
    pub sequence: SeqHandle,
    /// Its first row of `q`.
    pub qo_begin: u32,
    /// Its number of query tokens.
    pub qo_len: u32,
    /// Its number of keys, this step's tokens included.
    pub kv_len: u32,
    /// Leading queries whose K/V is not written by this sequence.
    pub num_cached_rows: u32,
}
