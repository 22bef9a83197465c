//! What the attention kernels read: the context tables of one step, as plain rows of words.
//!
//! The paper's context tuple `(C, i, j)` is a [`SegmentRow`]: a run of chunks and the range of
//! sequences that it covers. Rows keep their place from step to step, so that a step without a
//! structural change rewrites nothing but lengths.

/// The absent row index.
pub const NONE: u32 = u32::MAX;

/// One sequence of the step. `kv_len` includes the tokens that this step writes.
///
/// Query `t` of the sequence (`0 <= t < qo_len`) is row `qo_begin + t` of `q` and of the output,
/// and stands at token position `kv_len - qo_len + t`; it sees the keys at positions up to its own.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceRow {
    /// The deepest segment of the sequence's path, a row of `segments`; [`NONE`] if it has no keys.
    pub leaf: u32,
    /// First row of `q` and of the output.
    pub qo_begin: u32,
    /// Number of query tokens in this step.
    pub qo_len: u32,
    /// Number of keys up to and including the last query's own.
    pub kv_len: u32,
    /// Leading queries whose K/V is written by no one or by another sequence (slot -1).
    pub num_cached_rows: u32,
}

/// One segment: a run of chunks without a branch, whose chunk ids are contiguous in `page_ids`.
///
/// A long run may be cut into several rows, each the parent of the next.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentRow {
    /// The segment before this one on the path, or [`NONE`].
    pub parent: u32,
    /// First sequence that it covers, as an index into `order`.
    pub seq_begin: u32,
    /// One past the last sequence that it covers.
    pub seq_end: u32,
    /// Token position of its first key.
    pub start_pos: u32,
    /// Number of chunks. The last may be partly used: `kv_len` of the sequences bounds the keys.
    pub num_pages: u32,
    /// Index of its first chunk id in `page_ids`.
    pub ids_begin: u32,
}

/// The context tables of one step.
#[derive(Debug, Clone, Copy)]
pub struct PlanView<'a> {
    /// Tokens per chunk.
    pub page_size: u32,
    /// Rows of `q` and of the output, padding rows included. A row that no sequence names is padding.
    pub num_qo_rows: u32,
    /// Sequences in depth-first order: `order[i]` is a row of `sequences`. Every segment covers a
    /// contiguous range of this order.
    pub order: &'a [u32],
    /// Sequence rows; those that `order` does not name are unused.
    pub sequences: &'a [SequenceRow],
    /// Rows of `segments` in use, parents before children.
    pub segment_order: &'a [u32],
    /// Segment rows; those that `segment_order` does not name are unused.
    pub segments: &'a [SegmentRow],
    /// Chunk ids (page numbers).
    pub page_ids: &'a [u32],
}

/// A row of a table: `repr(C)`, made of `u32` fields alone.
///
/// # Safety
/// The type must have the alignment of `u32`, no padding, and accept every bit pattern.
pub(super) unsafe trait Row: Copy {
    /// Words of one row.
    const WORDS: usize = size_of::<Self>() / size_of::<u32>();

    /// Reads a section of the image as rows; words past the last whole row are left out.
    fn rows(words: &[u32]) -> &[Self] {
        const { assert!(align_of::<Self>() == align_of::<u32>()) };
        const { assert!(size_of::<Self>() == Self::WORDS * size_of::<u32>() && Self::WORDS > 0) };
        // SAFETY: size and alignment are checked above, the implementor vouches for the rest, and
        // the rows cover no more than `words`.
        unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), words.len() / Self::WORDS) }
    }
}

// SAFETY: `repr(C)`, five fields of `u32`.
unsafe impl Row for SequenceRow {}
// SAFETY: `repr(C)`, six fields of `u32`.
unsafe impl Row for SegmentRow {}

impl SequenceRow {
    /// The row as words, in the order of the fields.
    pub(super) fn words(self) -> [u32; 5] {
        [self.leaf, self.qo_begin, self.qo_len, self.kv_len, self.num_cached_rows]
    }
}

impl SegmentRow {
    /// The row as words, in the order of the fields.
    pub(super) fn words(self) -> [u32; 6] {
        let Self { parent, seq_begin, seq_end, start_pos, num_pages, ids_begin } = self;
        [parent, seq_begin, seq_end, start_pos, num_pages, ids_begin]
    }
}
