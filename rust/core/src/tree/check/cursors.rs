//! Invariants of progress: what is written and scheduled, by whom, and who waits.

use std::collections::HashMap;

use super::super::PrefixTree;
use super::super::sequence::State;
use super::super::slab::NIL;
use super::ensure;

impl PrefixTree {
    /// The sequences that end at a segment.
    pub(super) fn ends_at(&self, segment: u32) -> impl Iterator<Item = u32> + '_ {
        let first = self.segments[segment].first_end;
        std::iter::successors((first != NIL).then_some(first), |&slot| {
            let next = self.sequences[slot].next_end;
            (next != NIL).then_some(next)
        })
    }

    fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        let all = 0..self.sequences.slots.len() as u32;
        all.filter(|&slot| self.sequences[slot].state != State::Vacant)
    }

    pub(super) fn check_ends(&self, segments: &[u32]) -> Result<(), String> {
        let mut listed = HashMap::new();
        for &id in segments {
            let mut prev = NIL;
            let mut slot = self.segments[id].first_end;
            while slot != NIL {
                let exists = (slot as usize) < self.sequences.slots.len();
                ensure!(13, exists, "segment {id} lists sequence {slot}");
                let q = &self.sequences[slot];
                ensure!(13, q.state != State::Vacant, "segment {id} lists free sequence {slot}");
                ensure!(13, q.leaf == id, "sequence {slot} ends at {}, listed at {id}", q.leaf);
                ensure!(13, q.prev_end == prev, "sequence {slot} follows {}", q.prev_end);
                ensure!(13, listed.insert(slot, id).is_none(), "sequence {slot} is listed twice");
                prev = slot;
                slot = q.next_end;
            }
        }
        let mut count = 0;
        for slot in self.slots() {
            count += 1;
            ensure!(13, listed.contains_key(&slot), "sequence {slot} ends nowhere");
            ensure!(13, !self.segments[listed[&slot]].is_root(), "sequence {slot} has no tokens");
        }
        let expected = self.sequences.num_ended();
        ensure!(13, count == expected, "{count} sequences, {expected} slots taken");
        let live = self.slots().filter(|&slot| self.sequences[slot].state == State::Live).count();
        ensure!(13, live == self.sequences.num_live, "{live} live of {}", self.sequences.num_live);
        Ok(())
    }

    pub(super) fn check_progress(&self, segments: &[u32]) -> Result<(), String> {
        for &id in segments {
            let s = &self.segments[id];
            let ordered = s.filled <= s.scheduled && s.scheduled <= s.len && s.known <= s.len;
            ensure!(7, ordered, "segment {id} is out of order: {s:?}");
            for child in self.children(id) {
                let c = &self.segments[child];
                ensure!(7, c.filled == 0 || s.filled == s.len, "{child} is written before {id}");
                let scheduled = c.scheduled == 0 || s.scheduled == s.len;
                ensure!(7, scheduled, "{child} is scheduled before {id}");
                ensure!(7, s.known == s.len, "{child} hangs below {id}, which has reserved slots");
            }
        }
        Ok(())
    }

    pub(super) fn check_writers(&self, segments: &[u32]) -> Result<(), String> {
        // Children before parents, by position: the oldest sequence at or below each segment.
        let mut order = segments.to_vec();
        order
            .sort_by_key(|&id| std::cmp::Reverse((self.segments[id].start, self.segments[id].len)));
        let mut oldest: HashMap<u32, u32> = HashMap::new();
        for &id in &order {
            let below = self.children(id).filter_map(|child| oldest.get(&child).copied());
            let best =
                below.chain(self.ends_at(id)).min_by_key(|&slot| self.sequences[slot].serial);
            if let Some(best) = best {
                oldest.insert(id, best);
            }
            let s = &self.segments[id];
            if s.filled < s.len {
                let expected = best.unwrap_or(NIL);
                ensure!(
                    8,
                    s.writer == expected,
                    "{} writes segment {id}, not {expected}",
                    s.writer
                );
                ensure!(8, s.writer != NIL, "nobody writes segment {id}");
            }
        }
        Ok(())
    }

    pub(super) fn check_cursors(&self) -> Result<(), String> {
        for slot in self.slots() {
            let q = &self.sequences[slot];
            let tokens = self.num_tokens_of(slot);
            let ordered = q.computed <= q.scheduled && q.scheduled <= tokens;
            ensure!(13, ordered, "sequence {slot}: {} {} of {tokens}", q.computed, q.scheduled);
            if q.wait_source != NIL {
                continue;
            }
            for id in self.path_of(slot) {
                let s = &self.segments[id];
                if s.writer != slot {
                    continue;
                }
                let unwritten = s.start + s.filled;
                let behind = s.filled == s.len || q.computed <= unwritten;
                ensure!(13, behind, "sequence {slot} is past its unwritten token {unwritten}");
                let unscheduled = s.start + s.scheduled;
                let behind = s.scheduled == s.len || q.scheduled <= unscheduled;
                ensure!(13, behind, "sequence {slot} is past its unplanned token {unscheduled}");
            }
        }
        Ok(())
    }

    pub(super) fn check_steps(&self, segments: &[u32]) -> Result<(), String> {
        let mut open_steps: HashMap<u32, u32> = HashMap::new();
        let mut scheduled: HashMap<u32, u32> = HashMap::new();
        let mut cursor: HashMap<u32, u32> = HashMap::new();
        let mut previous = None;
        for step in &self.steps.open {
            ensure!(14, previous < Some(step.id), "step {} is out of order", step.id);
            previous = Some(step.id);
            for row in &step.rows {
                let exists = (row.slot as usize) < self.sequences.slots.len()
                    && self.sequences[row.slot].state != State::Vacant;
                ensure!(14, exists, "step {} names free sequence {}", step.id, row.slot);
                *open_steps.entry(row.slot).or_default() += 1;
                if step.is_stale() {
                    continue;
                }
                let ordered = row.start <= row.first_write && row.first_write <= row.end;
                let inside = row.end <= self.num_tokens_of(row.slot);
                ensure!(14, ordered && inside, "step {} has the row {row:?}", step.id);
                let at = cursor.entry(row.slot).or_default();
                *at = (*at).max(row.end);
                for id in self.path_of(row.slot) {
                    let s = &self.segments[id];
                    if row.first_write < s.end().min(row.end) && s.start < row.end {
                        let reach = scheduled.entry(id).or_default();
                        *reach = (*reach).max(row.end.min(s.end()) - s.start);
                    }
                }
            }
        }
        for slot in self.slots() {
            let q = &self.sequences[slot];
            let count = open_steps.get(&slot).copied().unwrap_or(0);
            ensure!(
                14,
                q.open_steps == count,
                "sequence {slot} counts {} of {count}",
                q.open_steps
            );
            let leaving = q.state == State::Leaving;
            ensure!(14, !leaving || count > 0, "sequence {slot} is leaving without a step");
            let expected = cursor.get(&slot).copied().unwrap_or(0).max(q.computed);
            ensure!(14, q.scheduled == expected, "sequence {slot}: {} not {expected}", q.scheduled);
        }
        for &id in segments {
            let s = &self.segments[id];
            let expected = scheduled.get(&id).copied().unwrap_or(0).max(s.filled);
            ensure!(14, s.scheduled == expected, "segment {id}: {} not {expected}", s.scheduled);
        }
        let idle = self.steps.open.is_empty();
        ensure!(14, !idle || self.steps.held.is_empty(), "chunks are held without an open step");
        Ok(())
    }

    pub(super) fn check_waits(&self) -> Result<(), String> {
        let mut listed = 0;
        for source in self.slots() {
            let mut prev = NIL;
            let mut waiter = self.sequences[source].first_waiter;
            while waiter != NIL {
                let q = &self.sequences[waiter];
                let linked = q.wait_source == source && q.prev_waiter == prev;
                ensure!(15, linked, "waiter {waiter} is not linked to {source}");
                let end = q.wait_end;
                let inside =
                    0 < end && end <= self.num_known_of(source).min(self.num_known_of(waiter));
                ensure!(15, inside, "{waiter} waits for token {end} of {source}");
                let begin = self.chunk_begin(end - 1);
                let (held, own) = (self.segment_at(source, begin), self.segment_at(waiter, begin));
                let (h, o) = (&self.segments[held], &self.segments[own]);
                ensure!(15, h.start + h.filled < end, "{waiter} waits for what is written");
                ensure!(15, o.start + o.filled <= begin, "{waiter} waits but has written");
                let part = |id: u32, start: u32| {
                    &self.known_tokens(id)[(begin - start) as usize..(end - start) as usize]
                };
                let equal = part(held, h.start) == part(own, o.start);
                ensure!(15, equal, "{waiter} waits for other tokens than its own");
                listed += 1;
                ensure!(15, listed <= self.sequences.slots.len(), "the waiters form a ring");
                prev = waiter;
                waiter = q.next_waiter;
            }
        }
        let waiting = self.slots().filter(|&slot| self.sequences[slot].wait_source != NIL).count();
        ensure!(15, waiting == listed, "{waiting} waiting, {listed} listed");
        Ok(())
    }
}
