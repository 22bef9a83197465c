//! Forking: a second sequence that goes on from where the first one stands.

use super::PrefixTree;
use super::slab::NIL;
use super::types::{CopyChunk, Forked, SeqHandle};
use crate::error::{Error, Result};

impl PrefixTree {
    /// Adds a sequence with the known tokens of `seq` (its reserved slots are not taken over).
    ///
    /// Full chunks are shared; the head of a partial last chunk is copied. If that head is not
    /// written yet, the fork waits: it cannot be planned until the source's commit reports the
    /// copy. Should the source leave before that, the fork writes those tokens itself.
    ///
    /// The fork is computed as far as its source; what the source still has to write up to here
    /// counts as computed for the fork too.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::InvalidConfig`] if the tree does not share prefixes or
    /// no token of the source is known; [`Error::OutOfChunks`]. Nothing changes then.
    pub fn fork(&mut self, seq: SeqHandle) -> Result<Forked> {
        self.expire_pins();
        let source = self.resolve("seq", seq)?;
        if !self.sharing {
            return Err(Error::invalid(
                "enable_prefix_sharing",
                "false",
                "true for fork; insert the tokens once more instead",
            ));
        }
        let num_tokens = self.num_known_of(source);
        if !num_tokens.is_multiple_of(self.chunk_size) {
            self.ensure_free(1)?;
        }
        let slot = self.sequences.open();
        let (copy, waiting) = self.fork_at(source, slot, num_tokens);
        self.journal.structure_version += 1;
        Ok(Forked { seq: self.sequences.handle(slot), copy, waiting })
    }

    /// Lets the sequence `slot`, which ends nowhere, take over the first `num_tokens` tokens of
    /// `source`. A chunk must be free for the head of a partial one.
    pub(super) fn fork_at(
        &mut self,
        source: u32,
        slot: u32,
        num_tokens: u32,
    ) -> (Option<CopyChunk>, bool) {
        let shared = num_tokens - num_tokens % self.chunk_size;
        let num_head = num_tokens - shared;
        let parent = self.node_at(source, shared);
        self.link_end(slot, parent);
        self.hold_path(parent);
        let computed = self.sequences[source].computed;
        let mut fork_computed = computed.min(num_tokens);
        if computed < num_tokens && self.writes_before(source, num_tokens) {
            fork_computed = num_tokens;
        }
        self.sequences[slot].computed = fork_computed;
        self.sequences[slot].scheduled = fork_computed;
        if num_head == 0 {
            return (None, false);
        }

        let held = self.segment_at(source, shared);
        let s = &self.segments[held];
        let chunk = ((shared - s.start) / self.chunk_size) as usize;
        let written = s.start + s.filled >= num_tokens;
        let begin = (shared - s.start) as usize;
        let head = self.known_tokens(held)[begin..begin + num_head as usize].to_vec();
        let src = self.chunks(held)[chunk];
        let writer = s.writer;
        self.extend(slot, &head);
        if !written {
            self.link_waiter(slot, writer, num_tokens);
            return (None, true);
        }
        self.mark_filled(slot, shared, num_tokens);
        let dst = self.chunks(self.sequences[slot].leaf)[0];
        (Some(CopyChunk { src, dst, num_tokens: num_head as usize }), false)
    }

    /// The segment of the path of `slot` that ends at `position`, a multiple of the chunk; made
    /// by a split if it has to be.
    pub(super) fn node_at(&mut self, slot: u32, position: u32) -> u32 {
        let mut segment = self.sequences[slot].leaf;
        while self.segments[segment].start >= position && !self.segments[segment].is_root() {
            segment = self.segments[segment].parent;
        }
        let s = &self.segments[segment];
        if s.end() <= position {
            return segment;
        }
        let num_chunks = (position - s.start) / self.chunk_size;
        self.split(segment, num_chunks)
    }

    /// Whether `slot` itself has something to write before `position`.
    fn writes_before(&self, slot: u32, position: u32) -> bool {
        let mut segment = self.sequences[slot].leaf;
        while segment != NIL {
            let s = &self.segments[segment];
            if s.writer == slot && s.filled < s.len && s.start + s.filled < position {
                return true;
            }
            if s.filled > 0 {
                return false;
            }
            segment = s.parent;
        }
        false
    }

    /// Makes the copies that the waiting forks of `slot`, and theirs in turn, have waited for.
    pub(super) fn resolve_waits_on(&mut self, slot: u32, copies: &mut Vec<CopyChunk>) {
        let mut sources = vec![slot];
        while let Some(source) = sources.pop() {
            let mut waiter = self.sequences[source].first_waiter;
            while waiter != NIL {
                let next = self.sequences[waiter].next_waiter;
                let end = self.sequences[waiter].wait_end;
                let held = self.segment_at(source, end - 1);
                let s = &self.segments[held];
                if s.start + s.filled >= end {
                    let begin = self.chunk_begin(end - 1);
                    let own = self.segment_at(waiter, begin);
                    copies.push(CopyChunk {
                        src: self.chunk_at(held, begin),
                        dst: self.chunk_at(own, begin),
                        num_tokens: (end - begin) as usize,
                    });
                    self.unlink_waiter(waiter);
                    self.mark_filled(waiter, begin, end);
                    sources.push(waiter);
                }
                waiter = next;
            }
        }
    }

    /// The chunk of a segment that holds `position`.
    fn chunk_at(&self, segment: u32, position: u32) -> crate::pool::ChunkId {
        let index = (position - self.segments[segment].start) / self.chunk_size;
        self.chunks(segment)[index as usize]
    }
}
