//! The nodes: runs of contiguous tokens and chunks, and the segments that are windows on them.

use super::slab::NIL;
use crate::pool::ChunkId;

/// Contiguous tokens and their chunks. It grows and shrinks only at its end; the segments that are
/// windows on it follow one another on one path.
#[derive(Debug, Clone, Default)]
pub(super) struct Run {
    pub tokens: Vec<u32>,
    pub chunks: Vec<ChunkId>,
    /// Segments that are windows on it.
    pub num_segments: u32,
    /// Changes whenever a chunk is given back.
    pub generation: u64,
}

/// A run of chunks without a branch. A namespace's root is a segment without tokens.
#[derive(Debug, Clone)]
pub(super) struct Segment {
    pub run: u32,
    /// Index in the run of its first chunk.
    pub first_chunk: u32,
    /// Tokens, reserved slots included.
    pub len: u32,
    /// Position of its first token.
    pub start: u32,
    /// Leading tokens whose K/V is written.
    pub filled: u32,
    /// Leading tokens whose K/V is written or will be by the open steps.
    pub scheduled: u32,
    /// Leading tokens whose ids are known.
    pub known: u32,
    /// Sequences that pass through or end here.
    pub live: u32,
    /// Pins that pass through or end here.
    pub pins: u32,
    /// Pins that end here.
    pub pin_ends: u32,
    /// The sequence that writes what is not written yet; `NIL` once all is.
    pub writer: u32,
    pub parent: u32,
    pub first_child: u32,
    pub prev: u32,
    pub next: u32,
    /// The first of the sequences that end here.
    pub first_end: u32,
    pub lru_prev: u32,
    pub lru_next: u32,
    /// The first token, once it is known.
    pub first_token: u32,
    /// Siblings with the same first token.
    pub chain_prev: u32,
    pub chain_next: u32,
    pub chained: bool,
    /// Whether the table of full first chunks names it.
    pub indexed: bool,
    /// Whether its first chunk is full and known, but the table names a sibling with the same one.
    pub twin: bool,
    /// Hash of the parent and the first chunk's tokens, if `indexed` or `twin`; of the salt, for a
    /// root.
    pub hash: u64,
}

impl Default for Segment {
    fn default() -> Self {
        Self {
            run: NIL,
            first_chunk: 0,
            len: 0,
            start: 0,
            filled: 0,
            scheduled: 0,
            known: 0,
            live: 0,
            pins: 0,
            pin_ends: 0,
            writer: NIL,
            parent: NIL,
            first_child: NIL,
            prev: NIL,
            next: NIL,
            first_end: NIL,
            lru_prev: NIL,
            lru_next: NIL,
            first_token: 0,
            chain_prev: NIL,
            chain_next: NIL,
            chained: false,
            indexed: false,
            twin: false,
            hash: 0,
        }
    }
}

impl Segment {
    pub(super) fn is_root(&self) -> bool {
        self.run == NIL
    }

    /// Whether neither a sequence nor a pin holds it.
    pub(super) fn is_retained(&self) -> bool {
        self.live == 0 && self.pins == 0
    }

    /// One past the position of its last token.
    pub(super) fn end(&self) -> u32 {
        self.start + self.len
    }

    pub(super) fn num_chunks(&self, chunk_size: u32) -> u32 {
        self.len.div_ceil(chunk_size)
    }

    /// Index in the run of the chunk after its last.
    pub(super) fn end_chunk(&self, chunk_size: u32) -> u32 {
        self.first_chunk + self.num_chunks(chunk_size)
    }
}

/// Running totals over the segments, so that every account is O(1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Accounts {
    /// Tokens of the live sequences, each sequence's counted for itself.
    pub logical_tokens: u64,
    /// Tokens in live segments, each counted once.
    pub physical_tokens: u64,
    /// The part of `logical_tokens` that lies in segments with two sequences or more.
    pub shared_tokens: u64,
    /// Chunks of live segments.
    pub live_chunks: u64,
    /// Chunks that neither a sequence nor a pin holds.
    pub evictable_chunks: u64,
    /// Chunks that a pin holds.
    pub pinned_chunks: u64,
}

impl Accounts {
    fn of(segment: &Segment, chunk_size: u32) -> Self {
        let tokens = u64::from(segment.len);
        let chunks = u64::from(segment.num_chunks(chunk_size));
        let live = u64::from(segment.live);
        let when = |condition: bool, amount: u64| if condition { amount } else { 0 };
        Self {
            logical_tokens: live * tokens,
            physical_tokens: when(live > 0, tokens),
            shared_tokens: when(live > 1, live * tokens),
            live_chunks: when(live > 0, chunks),
            evictable_chunks: when(segment.is_retained(), chunks),
            pinned_chunks: when(segment.pins > 0, chunks),
        }
    }

    pub(super) fn add(&mut self, segment: &Segment, chunk_size: u32) {
        let part = Self::of(segment, chunk_size);
        self.logical_tokens += part.logical_tokens;
        self.physical_tokens += part.physical_tokens;
        self.shared_tokens += part.shared_tokens;
        self.live_chunks += part.live_chunks;
        self.evictable_chunks += part.evictable_chunks;
        self.pinned_chunks += part.pinned_chunks;
    }

    pub(super) fn subtract(&mut self, segment: &Segment, chunk_size: u32) {
        let part = Self::of(segment, chunk_size);
        self.logical_tokens -= part.logical_tokens;
        self.physical_tokens -= part.physical_tokens;
        self.shared_tokens -= part.shared_tokens;
        self.live_chunks -= part.live_chunks;
        self.evictable_chunks -= part.evictable_chunks;
        self.pinned_chunks -= part.pinned_chunks;
    }
}
