//! A sequence leaves a path: what stays for reuse, what is freed, and who inherits its work.

use super::PrefixTree;
use super::sequence::State;
use super::slab::NIL;
use super::types::{Inherited, SeqHandle};
use crate::error::Result;

impl PrefixTree {
    /// Removes a sequence. Its handle is invalid from here on.
    ///
    /// Full written chunks are retained for reuse until they are evicted; a partial leaf and chunks
    /// that nobody has written are freed. What this sequence was to write and others share is
    /// inherited by the oldest of them, which is reported. A sequence that is part of an open step
    /// keeps its chunks until the step closes, which then reports the inheritance.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`](crate::error::Error::UnknownSequence), also for a second removal.
    pub fn remove(&mut self, seq: SeqHandle) -> Result<Vec<Inherited>> {
        let slot = self.resolve("seq", seq)?;
        self.expire_pins();
        let mut inherited = Vec::new();
        self.journal.structure_version += 1;
        if self.sequences[slot].open_steps > 0 {
            self.sequences.make_leaving(slot);
        } else {
            self.drop_sequence(slot, &mut inherited);
            self.retain_live_heirs(&mut inherited);
        }
        Ok(inherited)
    }

    /// Takes a sequence that is in no open step off its path and closes its slot.
    pub(super) fn drop_sequence(&mut self, slot: u32, inherited: &mut Vec<Inherited>) {
        debug_assert!(self.sequences[slot].state != State::Vacant);
        self.end_waits_on(slot, 0, inherited);
        if self.sequences[slot].wait_source != NIL {
            self.unlink_waiter(slot);
        }
        let leaf = self.sequences[slot].leaf;
        self.unlink_end(slot);
        self.release_path(slot, leaf, NIL, self.sharing, inherited);
        self.sequences.close(slot);
    }

    /// Counts one sequence less from `segment` up to, but without, `stop`.
    ///
    /// With `retain`, full written chunks stay for reuse; without, only those that others hang on.
    pub(super) fn release_path(
        &mut self,
        slot: u32,
        segment: u32,
        stop: u32,
        retain: bool,
        inherited: &mut Vec<Inherited>,
    ) {
        let mut segment = segment;
        while segment != stop {
            let parent = self.segments[segment].parent;
            self.update(segment, |s| s.live -= 1);
            let s = &self.segments[segment];
            if s.is_root() {
                self.prune_root(segment);
            } else if s.is_retained() {
                self.release_segment(segment, retain);
            } else {
                if s.writer == slot {
                    self.pass_on(segment, inherited);
                }
                self.merge_into_child(segment);
            }
            segment = parent;
        }
    }

    /// Retains or frees a segment that its last holder has just left.
    pub(super) fn release_segment(&mut self, segment: u32, retain: bool) {
        let s = &self.segments[segment];
        if s.first_child == NIL {
            let usable = s.filled.min(s.known);
            let kept = if retain { usable - usable % self.chunk_size } else { 0 };
            if kept == 0 {
                self.free_segment(segment);
                return;
            }
            if kept < s.len {
                self.cut(segment, kept);
            }
        }
        let s = &mut self.segments[segment];
        s.writer = NIL;
        s.scheduled = s.filled;
        self.lru_push(segment);
        if !self.segments[segment].indexed {
            self.index_first_chunk(segment);
        }
        if self.segments[segment].indexed {
            self.merge_into_child(segment);
        } else {
            self.deduplicate(segment);
        }
    }

    /// Hands the unwritten part of a segment to the oldest of the sequences that share it.
    fn pass_on(&mut self, segment: u32, inherited: &mut Vec<Inherited>) {
        let s = &self.segments[segment];
        if s.filled == s.len {
            return;
        }
        let (begin, end) = (s.start + s.filled, s.end());
        let heir = self.oldest_below(segment);
        let s = &mut self.segments[segment];
        s.writer = heir;
        s.scheduled = s.filled;
        self.take_over(heir, begin, end, inherited);
    }

    /// Moves the cursors of `slot` back to `begin` and reports that it writes `[begin, end)`.
    pub(super) fn take_over(
        &mut self,
        slot: u32,
        begin: u32,
        end: u32,
        inherited: &mut Vec<Inherited>,
    ) {
        let sequence = &mut self.sequences[slot];
        sequence.computed = sequence.computed.min(begin);
        sequence.scheduled = sequence.scheduled.min(begin);
        let seq = self.sequences.handle(slot);
        let (begin, end) = (begin as usize, end as usize);
        if let Some(known) = inherited.iter_mut().find(|known| known.seq == seq) {
            known.begin = known.begin.min(begin);
            known.end = known.end.max(end);
        } else {
            inherited.push(Inherited { seq, begin, end });
        }
    }

    /// Leaves out the heirs that are themselves leaving: they pass their work on when their step
    /// closes, which reports who gets it.
    pub(super) fn retain_live_heirs(&self, inherited: &mut Vec<Inherited>) {
        inherited.retain(|heir| self.sequences.find(heir.seq).is_some());
    }

    /// The oldest sequence that passes through or ends at a live segment.
    fn oldest_below(&self, segment: u32) -> u32 {
        let mut oldest = NIL;
        let mut pending = vec![segment];
        while let Some(segment) = pending.pop() {
            let mut slot = self.segments[segment].first_end;
            while slot != NIL {
                let sequence = &self.sequences[slot];
                if oldest == NIL || sequence.serial < self.sequences[oldest].serial {
                    oldest = slot;
                }
                slot = sequence.next_end;
            }
            pending.extend(self.children(segment).filter(|&child| self.segments[child].live > 0));
        }
        oldest
    }

    /// Ends the waiting of the forks of `slot` that wait for tokens beyond position `kept`: they
    /// write their partial chunk themselves.
    pub(super) fn end_waits_on(&mut self, slot: u32, kept: u32, inherited: &mut Vec<Inherited>) {
        let mut waiter = self.sequences[slot].first_waiter;
        while waiter != NIL {
            let next = self.sequences[waiter].next_waiter;
            let end = self.sequences[waiter].wait_end;
            if end > kept {
                self.unlink_waiter(waiter);
                self.take_over(waiter, self.chunk_begin(end - 1), end, inherited);
            }
            waiter = next;
        }
    }

    /// Position of the first token of the chunk that holds `position`.
    pub(super) fn chunk_begin(&self, position: u32) -> u32 {
        position - position % self.chunk_size
    }
}
