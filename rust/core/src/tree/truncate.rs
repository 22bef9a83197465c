//! Truncation: a private chunk is cut in place, a shared one is copied.

use super::PrefixTree;
use super::slab::NIL;
use super::types::{CopyChunk, Inherited, SeqHandle, Truncated};
use crate::error::{Error, Result};

impl PrefixTree {
    /// Shortens a sequence to its first `num_tokens` tokens.
    ///
    /// What only this sequence used beyond that is freed. If the cut goes through a chunk that
    /// another sequence, a retained child or a pin still needs, that chunk stays whole and the
    /// sequence gets a copy of its head ([`Truncated::copy`]). What others share and this sequence
    /// was to write is inherited by the oldest of them.
    ///
    /// In an open step, the sequence's rows beyond the cut no longer count at the commit, and the
    /// freed chunks stay in use until the step closes. If others depend on those rows, the
    /// sequence goes on as a fork of what it was, possibly waiting for the commit.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::InvalidConfig`] if `num_tokens` is zero or beyond the
    /// end; [`Error::OutOfChunks`] if there is no chunk for the copy. Nothing changes then.
    pub fn truncate(&mut self, seq: SeqHandle, num_tokens: usize) -> Result<Truncated> {
        self.expire_pins();
        let slot = self.resolve("seq", seq)?;
        let end = self.num_tokens_of(slot);
        if num_tokens == 0 || num_tokens > end as usize {
            return Err(Error::invalid("num_tokens", num_tokens, format!("1 to {end}")));
        }
        let mut result = Truncated::default();
        self.truncate_slot(slot, num_tokens as u32, &mut result)?;
        self.retain_live_heirs(&mut result.inherited);
        Ok(result)
    }

    /// Whether [`truncate`](Self::truncate) to `num_tokens` would copy the head of a chunk that others
    /// need, as far as can be said before it evicts; false for arguments that it refuses.
    pub fn truncate_copies(&self, seq: SeqHandle, num_tokens: usize) -> bool {
        let Ok(slot) = self.resolve("seq", seq) else { return false };
        num_tokens > 0
            && num_tokens < self.num_tokens_of(slot) as usize
            && !num_tokens.is_multiple_of(self.chunk_size as usize)
            && !self.is_private_from(slot, num_tokens as u32)
    }

    pub(super) fn truncate_slot(
        &mut self,
        slot: u32,
        num_tokens: u32,
        result: &mut Truncated,
    ) -> Result<()> {
        if num_tokens == self.num_tokens_of(slot) {
            return Ok(());
        }
        let mut private = self.is_private_from(slot, num_tokens);
        if !private && !num_tokens.is_multiple_of(self.chunk_size) {
            self.ensure_free(1)?;
            // Eviction may have taken what hung on the chunk.
            private = self.is_private_from(slot, num_tokens);
        }
        self.journal.structure_version += 1;
        let in_step = self.sequences[slot].open_steps > 0;
        if in_step && !private {
            let old = self.leave_path_to_steps(slot);
            (result.copy, result.waiting) = self.fork_at(old, slot, num_tokens);
            return Ok(());
        }
        self.end_waits_on(slot, num_tokens, &mut result.inherited);
        self.end_own_wait(slot, num_tokens, &mut result.inherited);
        let sequence = &mut self.sequences[slot];
        sequence.computed = sequence.computed.min(num_tokens);
        sequence.scheduled = sequence.scheduled.min(num_tokens);
        if private {
            self.steps.set_holding(in_step);
            self.cut_private(slot, num_tokens, &mut result.inherited);
            self.steps.set_holding(false);
            self.steps.clip(slot, num_tokens);
        } else {
            self.leave_shared(slot, num_tokens, result);
        }
        Ok(())
    }

    /// Whether nobody but `slot` needs the chunks that hold its tokens from `num_tokens` on.
    fn is_private_from(&self, slot: u32, num_tokens: u32) -> bool {
        let mut below = NIL;
        let mut segment = self.sequences[slot].leaf;
        loop {
            let s = &self.segments[segment];
            if s.end() <= num_tokens {
                return true;
            }
            let only_path_below = if below == NIL {
                s.first_child == NIL
            } else {
                self.only_child(segment).is_some()
            };
            if s.live > 1 || s.pins > 0 || !only_path_below {
                return false;
            }
            below = segment;
            segment = s.parent;
        }
    }

    /// A waiting fork that loses part of the head it waits for writes the rest itself.
    fn end_own_wait(&mut self, slot: u32, num_tokens: u32, inherited: &mut Vec<Inherited>) {
        let sequence = &self.sequences[slot];
        if sequence.wait_source == NIL || num_tokens >= sequence.wait_end {
            return;
        }
        let begin = self.chunk_begin(sequence.wait_end - 1);
        self.unlink_waiter(slot);
        if num_tokens > begin {
            self.take_over(slot, begin, num_tokens, inherited);
        }
    }

    /// Frees what `slot` alone uses from `num_tokens` on.
    fn cut_private(&mut self, slot: u32, num_tokens: u32, inherited: &mut Vec<Inherited>) {
        let leaf = self.sequences[slot].leaf;
        let last = self.segment_at(slot, num_tokens - 1);
        if last != leaf {
            self.unlink_end(slot);
            self.link_end(slot, last);
            self.release_path(slot, leaf, last, false, inherited);
        }
        let s = &self.segments[last];
        if num_tokens < s.end() {
            self.cut(last, num_tokens - s.start);
        }
    }

    /// Lets `slot` end at `num_tokens` where others need the chunks beyond that.
    fn leave_shared(&mut self, slot: u32, num_tokens: u32, result: &mut Truncated) {
        let shared = self.chunk_begin(num_tokens);
        let held = self.segment_at(slot, shared);
        let s = &self.segments[held];
        let begin = shared - s.start;
        let written = (s.start + s.filled).clamp(shared, num_tokens);
        let src = self.chunks(held)[(begin / self.chunk_size) as usize];
        let head = (begin as usize)..(begin + num_tokens - shared) as usize;
        let head = self.known_tokens(held)[head].to_vec();

        let stop = self.node_at(slot, shared);
        let leaf = self.sequences[slot].leaf;
        self.unlink_end(slot);
        self.link_end(slot, stop);
        self.release_path(slot, leaf, stop, false, &mut result.inherited);
        if head.is_empty() {
            return;
        }
        self.extend(slot, &head);
        if written > shared {
            self.mark_filled(slot, shared, written);
            let dst = self.chunks(self.sequences[slot].leaf)[0];
            let num_tokens = (written - shared) as usize;
            result.copy = Some(CopyChunk { src, dst, num_tokens });
        }
        let sequence = &mut self.sequences[slot];
        sequence.computed = sequence.computed.min(written);
        sequence.scheduled = sequence.scheduled.min(written);
    }

    /// Leaves the path of `slot`, its rows in the open steps and its waiting forks to a new
    /// sequence, which goes when those steps close. `slot` then ends nowhere and is in no step.
    fn leave_path_to_steps(&mut self, slot: u32) -> u32 {
        let old = self.sequences.open();
        let leaf = self.sequences[slot].leaf;
        self.unlink_end(slot);
        self.link_end(old, leaf);
        let fresh_serial = self.sequences[old].serial;
        let sequence = self.sequences[slot].clone();
        self.sequences[old].serial = sequence.serial;
        self.sequences[old].computed = sequence.computed;
        self.sequences[old].scheduled = sequence.scheduled;
        self.sequences[old].open_steps = sequence.open_steps;
        self.sequences[slot].serial = fresh_serial;
        self.sequences[slot].open_steps = 0;
        self.sequences.make_leaving(old);
        while self.sequences[slot].first_waiter != NIL {
            let waiter = self.sequences[slot].first_waiter;
            let end = self.sequences[waiter].wait_end;
            self.unlink_waiter(waiter);
            self.link_waiter(waiter, old, end);
        }
        let mut segment = leaf;
        while segment != NIL {
            let s = &mut self.segments[segment];
            if s.writer == slot {
                s.writer = old;
            }
            segment = s.parent;
        }
        self.steps.hand_over(slot, old);
        old
    }
}
