//! Sequences: their handles, their cursors, and the lists that they stand in.

use super::PrefixTree;
use super::slab::NIL;
use super::types::{SeqHandle, SequenceInfo};
use crate::error::{Error, Result};
use crate::pool::ChunkId;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Vacant,
    Live,
    /// Removed, but part of an open step: its path stays until the step closes.
    Leaving,
}

/// A sequence ends at the end of its leaf, which gives its number of tokens.
#[derive(Debug, Clone)]
pub(super) struct Sequence {
    /// Moves with every removal, so that an old handle is never mistaken for a new one.
    pub generation: u32,
    pub state: State,
    pub leaf: u32,
    /// Next position to compute, by the committed steps.
    pub computed: u32,
    /// Next position to plan, after the open steps.
    pub scheduled: u32,
    /// Age: of the sequences that share a segment, the oldest writes it.
    pub serial: u64,
    /// Open steps that it is part of.
    pub open_steps: u32,
    /// The last batch operation that named it, to find duplicates.
    pub mark: u64,
    pub prev_end: u32,
    pub next_end: u32,
    /// The sequence whose partial chunk it waits to copy, up to position `wait_end`.
    pub wait_source: u32,
    pub wait_end: u32,
    pub first_waiter: u32,
    pub prev_waiter: u32,
    pub next_waiter: u32,
}

impl Sequence {
    fn vacant() -> Self {
        Self {
            generation: 0,
            state: State::Vacant,
            leaf: NIL,
            computed: 0,
            scheduled: 0,
            serial: 0,
            open_steps: 0,
            mark: 0,
            prev_end: NIL,
            next_end: NIL,
            wait_source: NIL,
            wait_end: 0,
            first_waiter: NIL,
            prev_waiter: NIL,
            next_waiter: NIL,
        }
    }
}

/// All sequences, by slot.
#[derive(Debug, Clone, Default)]
pub(super) struct Sequences {
    pub slots: Vec<Sequence>,
    vacant: Vec<u32>,
    next_serial: u64,
    next_mark: u64,
    /// Sequences that are live, without those that are leaving.
    pub num_live: usize,
}

impl Sequences {
    /// A live sequence that ends nowhere yet.
    pub(super) fn open(&mut self) -> u32 {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(Sequence::vacant());
            (self.slots.len() - 1) as u32
        });
        let serial = self.take_serial();
        let sequence = &mut self.slots[slot as usize];
        *sequence = Sequence {
            generation: sequence.generation,
            state: State::Live,
            serial,
            ..Sequence::vacant()
        };
        self.num_live += 1;
        slot
    }

    /// Invalidates the handle of a live sequence that stays for its open steps.
    pub(super) fn make_leaving(&mut self, slot: u32) {
        self.slots[slot as usize].state = State::Leaving;
        self.num_live -= 1;
    }

    pub(super) fn close(&mut self, slot: u32) {
        let sequence = &mut self.slots[slot as usize];
        if sequence.state == State::Live {
            self.num_live -= 1;
        }
        let generation = sequence.generation.wrapping_add(1);
        *sequence = Sequence { generation, ..Sequence::vacant() };
        self.vacant.push(slot);
    }

    /// Number of sequences that have a path: the live ones and those that are leaving.
    pub(super) fn num_ended(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    pub(super) fn take_serial(&mut self) -> u64 {
        self.next_serial += 1;
        self.next_serial
    }

    pub(super) fn take_mark(&mut self) -> u64 {
        self.next_mark += 1;
        self.next_mark
    }

    pub(super) fn handle(&self, slot: u32) -> SeqHandle {
        SeqHandle::new(slot, self.slots[slot as usize].generation)
    }

    /// The slot of a live sequence.
    pub(super) fn find(&self, handle: SeqHandle) -> Option<u32> {
        let sequence = self.slots.get(handle.slot() as usize)?;
        let valid = sequence.state == State::Live && sequence.generation == handle.generation();
        valid.then_some(handle.slot())
    }
}

impl std::ops::Index<u32> for Sequences {
    type Output = Sequence;

    fn index(&self, slot: u32) -> &Sequence {
        &self.slots[slot as usize]
    }
}

impl std::ops::IndexMut<u32> for Sequences {
    fn index_mut(&mut self, slot: u32) -> &mut Sequence {
        &mut self.slots[slot as usize]
    }
}

impl PrefixTree {
    /// The slot of the sequence that an argument names.
    pub(super) fn resolve(&self, argument: &str, handle: SeqHandle) -> Result<u32> {
        self.sequences.find(handle).ok_or_else(|| Error::UnknownSequence {
            argument: argument.to_owned(),
            handle: handle.as_u64(),
        })
    }

    /// The slots of the different sequences that a batch names.
    pub(super) fn resolve_batch(
        &mut self,
        argument: &str,
        handles: impl Iterator<Item = SeqHandle>,
        slots: &mut Vec<u32>,
    ) -> Result<()> {
        let mark = self.sequences.take_mark();
        slots.clear();
        for (i, handle) in handles.enumerate() {
            let Some(slot) = self.sequences.find(handle) else {
                return Err(Error::UnknownSequence {
                    argument: format!("{argument}[{i}]"),
                    handle: handle.as_u64(),
                });
            };
            let sequence = &mut self.sequences[slot];
            if sequence.mark == mark {
                return Err(Error::invalid(
                    format!("{argument}[{i}]"),
                    format!("sequence {handle} a second time"),
                    "each sequence once",
                ));
            }
            sequence.mark = mark;
            slots.push(slot);
        }
        Ok(())
    }

    /// Makes `slot` end at `segment`.
    pub(super) fn link_end(&mut self, slot: u32, segment: u32) {
        let first = std::mem::replace(&mut self.segments[segment].first_end, slot);
        if first != NIL {
            self.sequences[first].prev_end = slot;
        }
        let sequence = &mut self.sequences[slot];
        sequence.leaf = segment;
        sequence.prev_end = NIL;
        sequence.next_end = first;
    }

    /// Makes `slot` end nowhere.
    pub(super) fn unlink_end(&mut self, slot: u32) {
        let Self { sequences, segments, .. } = self;
        let (leaf, prev, next) =
            (sequences[slot].leaf, sequences[slot].prev_end, sequences[slot].next_end);
        if prev == NIL {
            segments[leaf].first_end = next;
        } else {
            sequences[prev].next_end = next;
        }
        if next != NIL {
            sequences[next].prev_end = prev;
        }
        sequences[slot].leaf = NIL;
    }

    /// Makes `slot` wait for `source` to have the K/V of its tokens up to `end`.
    pub(super) fn link_waiter(&mut self, slot: u32, source: u32, end: u32) {
        let first = std::mem::replace(&mut self.sequences[source].first_waiter, slot);
        if first != NIL {
            self.sequences[first].prev_waiter = slot;
        }
        let sequence = &mut self.sequences[slot];
        sequence.wait_source = source;
        sequence.wait_end = end;
        sequence.prev_waiter = NIL;
        sequence.next_waiter = first;
    }

    /// Ends the waiting of `slot`.
    pub(super) fn unlink_waiter(&mut self, slot: u32) {
        let sequence = &self.sequences[slot];
        let (source, prev, next) =
            (sequence.wait_source, sequence.prev_waiter, sequence.next_waiter);
        if prev == NIL {
            self.sequences[source].first_waiter = next;
        } else {
            self.sequences[prev].next_waiter = next;
        }
        if next != NIL {
            self.sequences[next].prev_waiter = prev;
        }
        let sequence = &mut self.sequences[slot];
        sequence.wait_source = NIL;
        sequence.wait_end = 0;
        sequence.prev_waiter = NIL;
        sequence.next_waiter = NIL;
    }

    /// Number of tokens of `slot`, reserved slots included.
    pub(super) fn num_tokens_of(&self, slot: u32) -> u32 {
        self.segments[self.sequences[slot].leaf].end()
    }

    /// Number of tokens of `slot` whose ids are known.
    pub(super) fn num_known_of(&self, slot: u32) -> u32 {
        let leaf = &self.segments[self.sequences[slot].leaf];
        leaf.start + leaf.known
    }

    /// The segment of the path of `slot` that holds `position`, which lies before its end.
    pub(super) fn segment_at(&self, slot: u32, position: u32) -> u32 {
        let mut segment = self.sequences[slot].leaf;
        while self.segments[segment].start > position {
            segment = self.segments[segment].parent;
        }
        segment
    }

    /// The segments of the path of `slot`, first one first.
    pub(super) fn path_of(&self, slot: u32) -> Vec<u32> {
        let mut path = Vec::new();
        let mut segment = self.sequences[slot].leaf;
        while !self.segments[segment].is_root() {
            path.push(segment);
            segment = self.segments[segment].parent;
        }
        path.reverse();
        path
    }

    /// A sequence's state.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn sequence(&self, seq: SeqHandle) -> Result<SequenceInfo> {
        let slot = self.resolve("seq", seq)?;
        let sequence = &self.sequences[slot];
        Ok(SequenceInfo {
            num_tokens: self.num_tokens_of(slot) as usize,
            num_known_tokens: self.num_known_of(slot) as usize,
            num_computed_tokens: sequence.computed as usize,
            num_scheduled_tokens: sequence.scheduled as usize,
            is_ready: self.can_begin(slot),
            is_waiting: sequence.wait_source != NIL,
        })
    }

    /// The chunks of a sequence, in token order.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn chunk_ids(&self, seq: SeqHandle) -> Result<Vec<ChunkId>> {
        let slot = self.resolve("seq", seq)?;
        let mut ids = Vec::new();
        for segment in self.path_of(slot) {
            ids.extend_from_slice(self.chunks(segment));
        }
        Ok(ids)
    }

    /// The known token ids of a sequence; reserved slots are left out.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn tokens(&self, seq: SeqHandle) -> Result<Vec<u32>> {
        let slot = self.resolve("seq", seq)?;
        let mut tokens = Vec::with_capacity(self.num_known_of(slot) as usize);
        for segment in self.path_of(slot) {
            tokens.extend_from_slice(self.known_tokens(segment));
        }
        Ok(tokens)
    }
}
