//! What the plan reads of the tree.

use super::PrefixTree;
use super::types::{RunKey, SegmentId, SegmentView, SeqHandle};
use crate::error::Result;
use crate::pool::ChunkId;

impl PrefixTree {
    /// The segment at whose end a sequence ends. The path goes on by [`SegmentView::parent`].
    ///
    /// # Errors
    /// [`Error::UnknownSequence`](crate::error::Error::UnknownSequence).
    pub fn leaf(&self, seq: SeqHandle) -> Result<SegmentId> {
        Ok(SegmentId(self.sequences[self.resolve("seq", seq)?].leaf))
    }

    /// A segment of a live path, as [`leaf`](Self::leaf) and [`SegmentView::parent`] give it.
    ///
    /// Segment ids are good for as long as [`structure_version`](Self::structure_version) stays.
    ///
    /// # Panics
    /// If the id never named a segment of this tree.
    pub fn segment(&self, id: SegmentId) -> SegmentView<'_> {
        let s = &self.segments[id.0];
        let parent = (!self.segments[s.parent].is_root()).then_some(SegmentId(s.parent));
        SegmentView {
            parent,
            run: RunKey { index: s.run, generation: self.runs[s.run].generation },
            first_chunk: s.first_chunk,
            start_pos: s.start,
            num_tokens: s.len,
            num_sequences: s.live,
            chunk_ids: self.chunks(id.0),
        }
    }

    /// All chunks of a run, of which [`SegmentView::chunk_ids`] is a part. Those that no segment
    /// covers any more are dead entries.
    ///
    /// # Panics
    /// If the key never named a run of this tree.
    pub fn run_chunks(&self, run: RunKey) -> &[ChunkId] {
        &self.runs[run.index].chunks
    }

    /// One past the largest [`SegmentId::index`] in use, for tables by segment.
    pub fn segment_bound(&self) -> usize {
        self.segments.bound() as usize
    }
}
