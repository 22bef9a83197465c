//! What the planner reads of a prefix tree.

use std::hash::Hash;

/// A segment of the tree: consecutive chunks of one run, at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// The segment before this one, or `None` at a root.
    pub parent: Option<u32>,
    /// The run that holds its chunk ids: a buffer that grows and shrinks at its end.
    pub run: u32,
    /// Differs from what it was if the run shrank or became another since: as long as it is the
    /// same, the run has only grown.
    pub generation: u64,
    /// Index in the run of its first chunk.
    pub begin: u32,
    /// Index in the run one past its last chunk.
    pub end: u32,
    /// Number of chunks before it on its path.
    pub start_chunk: u32,
}

/// A forest of segments with the sequences that end in it.
pub trait PlanSource {
    /// Names a sequence.
    type Sequence: Copy + Eq + Hash;

    /// Changes whenever a sequence's path changes in any way other than by growth of its last
    /// segment.
    fn structure_version(&self) -> u64;

    /// All segment indices are below this.
    fn segment_bound(&self) -> usize;

    /// The segment at the end of the sequence's path; `None` if it has no chunks.
    fn leaf(&self, sequence: Self::Sequence) -> Option<u32>;

    /// A segment by its index.
    fn window(&self, segment: u32) -> Window;

    /// The chunk ids of a run, at least up to the end of every window on it.
    fn chunk_ids(&self, run: u32) -> &[u32];
}

/// One sequence's part in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query<S> {
    /// The sequence.
    pub sequence: S,
    /// Its first row of `q`.
    pub qo_begin: u32,
    /// Its number of query tokens.
    pub qo_len: u32,
    /// Its number of keys, this step's tokens included.
    pub kv_len: u32,
    /// Leading queries whose K/V is not written by this sequence.
    pub num_cached_rows: u32,
}
