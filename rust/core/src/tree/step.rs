//! Steps: what a forward pass over a batch will write, and what it has written.
//!
//! A step is begun when it is planned and committed after the last layer. Several may be open, so
//! that the next one can be planned while this one runs; each sequence therefore has a committed
//! cursor (`computed`) and one that counts the open steps too (`scheduled`), and each segment
//! likewise `filled` and `scheduled`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::PrefixTree;
use super::sequence::State;
use super::slab::NIL;
use super::types::{Committed, SeqHandle, Step, StepId, StepRow};
use crate::error::{Error, Result};
use crate::pool::{ChunkId, ChunkPool};

/// A sequence's queries `[start, end)` in a step, of which it writes `[first_write, end)`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    pub slot: u32,
    pub start: u32,
    pub end: u32,
    pub first_write: u32,
}

#[derive(Debug, Clone)]
pub(super) struct OpenStep {
    pub id: u64,
    pub rows: Vec<Row>,
    stale: Stale,
}

impl OpenStep {
    /// Whether it builds on an earlier step that was aborted, and so on nothing.
    pub(super) fn is_stale(&self) -> bool {
        self.stale.0.load(Ordering::Acquire)
    }
}

/// Whether a step is stale, for it and for those who watch it. A copy of the tree has its own.
#[derive(Debug, Default)]
struct Stale(Arc<AtomicBool>);

impl Clone for Stale {
    fn clone(&self) -> Self {
        Self(Arc::new(AtomicBool::new(self.0.load(Ordering::Acquire))))
    }
}

/// Tells whether a step has become stale, without the tree.
#[derive(Debug, Clone)]
pub struct StepWatch {
    step: StepId,
    stale: Arc<AtomicBool>,
}

impl StepWatch {
    /// The step.
    pub fn step(&self) -> StepId {
        self.step
    }

    /// Whether it builds on an earlier step that was aborted, so that it can only be aborted too.
    pub fn is_stale(&self) -> bool {
        self.stale.load(Ordering::Acquire)
    }
}

/// The open steps, oldest first, and the chunks that they may still touch.
#[derive(Debug, Clone, Default)]
pub(super) struct Steps {
    pub open: VecDeque<OpenStep>,
    next_id: u64,
    /// Chunks that were freed under an open step, each with the newest step at that time.
    pub held: VecDeque<(u64, ChunkId)>,
    holding: bool,
}

impl Steps {
    /// Whether freed chunks stay in use until the steps that are open now have closed.
    pub(super) fn set_holding(&mut self, holding: bool) {
        self.holding = holding;
    }

    /// Gives a chunk back to the pool, now or when the open steps have closed.
    pub(super) fn give_back(&mut self, pool: &mut ChunkPool, chunk: ChunkId) {
        match self.open.back() {
            Some(newest) if self.holding => self.held.push_back((newest.id, chunk)),
            _ => pool.free(chunk),
        }
    }

    /// Gives back the chunks whose steps have all closed.
    fn release_held(&mut self, pool: &mut ChunkPool) {
        let oldest_open = self.open.front().map_or(u64::MAX, |step| step.id);
        while let Some(&(step, chunk)) = self.held.front()
            && step < oldest_open
        {
            self.held.pop_front();
            pool.free(chunk);
        }
    }

    /// Lets the rows of `slot` end at `num_tokens` at the latest.
    pub(super) fn clip(&mut self, slot: u32, num_tokens: u32) {
        let rows = self.open.iter_mut().flat_map(|step| &mut step.rows);
        for row in rows.filter(|row| row.slot == slot) {
            row.start = row.start.min(num_tokens);
            row.end = row.end.min(num_tokens);
            row.first_write = row.first_write.min(num_tokens);
        }
    }

    /// Gives the rows of one sequence to another.
    pub(super) fn hand_over(&mut self, from: u32, to: u32) {
        let rows = self.open.iter_mut().flat_map(|step| &mut step.rows);
        for row in rows.filter(|row| row.slot == from) {
            row.slot = to;
        }
    }

    fn position(&self, id: StepId) -> Result<usize> {
        let position = self.open.iter().position(|step| step.id == id.0);
        position.ok_or(Error::ClosedPlan { plan: id.0 })
    }
}

impl PrefixTree {
    /// Begins a step in which each sequence computes its next `qo_len` tokens.
    ///
    /// Every earlier token of each must be written, or be written by this step or by an open one;
    /// the order of the rows does not matter. The step holds its chunks until
    /// [`commit_step`](Self::commit_step) or [`abort_step`](Self::abort_step).
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::InvalidConfig`] if a sequence stands in the batch
    /// twice, has fewer than `qo_len` tokens left to compute, waits for a copy, or builds on tokens
    /// that nobody has written. Nothing changes then.
    pub fn begin_step(&mut self, batch: &[(SeqHandle, u32)]) -> Result<Step> {
        self.expire_pins();
        let mut slots = std::mem::take(&mut self.scratch);
        let resolved = self.resolve_batch("batch", batch.iter().map(|row| row.0), &mut slots);
        let rows = resolved.and_then(|()| self.make_rows(batch, &slots));
        self.scratch = slots;
        let rows = rows?;
        for row in &rows {
            self.schedule(row);
        }
        if let Some(i) = rows.iter().position(|row| !self.builds_on_scheduled(row)) {
            for row in &rows {
                self.unschedule(row);
            }
            let row = &rows[i];
            let given = format!(
                "sequence {}, whose tokens before {} are not written",
                batch[i].0, row.first_write
            );
            let allowed = "sequences whose earlier tokens are written, also by this step";
            return Err(Error::invalid(format!("batch[{i}]"), given, allowed));
        }
        let id = StepId(self.steps.next_id);
        self.steps.next_id += 1;
        let step_rows = rows
            .iter()
            .map(|row| StepRow {
                seq: self.sequences.handle(row.slot),
                start: row.start,
                len: row.end - row.start,
                num_cached_rows: row.first_write - row.start,
            })
            .collect();
        for row in &rows {
            self.sequences[row.slot].open_steps += 1;
        }
        self.steps.open.push_back(OpenStep { id: id.0, rows, stale: Stale::default() });
        Ok(Step { id, rows: step_rows })
    }

    /// A watch on an open step, for a plan that outlives the call that made it.
    ///
    /// # Errors
    /// [`Error::ClosedPlan`] if the step is closed.
    pub fn watch_step(&self, step: StepId) -> Result<StepWatch> {
        let open = &self.steps.open[self.steps.position(step)?];
        Ok(StepWatch { step, stale: Arc::clone(&open.stale.0) })
    }

    fn make_rows(&self, batch: &[(SeqHandle, u32)], slots: &[u32]) -> Result<Vec<Row>> {
        let mut rows = Vec::with_capacity(batch.len());
        for (i, (&(seq, qo_len), &slot)) in batch.iter().zip(slots).enumerate() {
            let sequence = &self.sequences[slot];
            if sequence.wait_source != NIL {
                let given = format!("sequence {seq}, a fork that waits for its source's commit");
                return Err(Error::invalid(
                    format!("batch[{i}]"),
                    given,
                    "sequences that are ready",
                ));
            }
            let left = self.num_tokens_of(slot) - sequence.scheduled;
            if left == 0 {
                let given = format!("sequence {seq}, which has no token left to compute");
                let allowed = "sequences with tokens to compute; append one first";
                return Err(Error::invalid(format!("batch[{i}]"), given, allowed));
            }
            if qo_len == 0 || qo_len > left {
                let given = format!("{qo_len} tokens for sequence {seq}");
                let allowed = format!("1 to {left}, the tokens that it has left to compute");
                return Err(Error::invalid(format!("qo_len[{i}]"), given, allowed));
            }
            rows.push(self.make_row(slot, qo_len));
        }
        Ok(rows)
    }

    /// The next `len` queries of a sequence, and the first of them that it writes itself.
    fn make_row(&self, slot: u32, len: u32) -> Row {
        let start = self.sequences[slot].scheduled;
        let end = start + len;
        let mut first_write = end;
        let mut segment = self.sequences[slot].leaf;
        loop {
            let s = &self.segments[segment];
            let next_write = s.start + s.scheduled;
            if s.writer == slot && next_write < s.end().min(end) {
                first_write = next_write.max(start);
            }
            if s.start <= start {
                return Row { slot, start, end, first_write };
            }
            segment = s.parent;
        }
    }

    /// Whether the tokens before the first one that a row writes are written or scheduled. That
    /// the last of them is suffices, since each segment is scheduled as a prefix, and what a
    /// row schedules in turn builds on its own last token before.
    fn builds_on_scheduled(&self, row: &Row) -> bool {
        if row.first_write == 0 {
            return true;
        }
        let s = &self.segments[self.segment_at(row.slot, row.first_write - 1)];
        s.start + s.scheduled >= row.first_write
    }

    /// Whether a step of one query can begin.
    pub(super) fn can_begin(&self, slot: u32) -> bool {
        let sequence = &self.sequences[slot];
        sequence.wait_source == NIL
            && sequence.scheduled < self.num_tokens_of(slot)
            && self.builds_on_scheduled(&self.make_row(slot, 1))
    }

    fn schedule(&mut self, row: &Row) {
        self.sequences[row.slot].scheduled = row.end;
        let Self { segments, sequences, .. } = self;
        let mut segment = sequences[row.slot].leaf;
        if row.first_write == row.end {
            return;
        }
        loop {
            let s = &mut segments[segment];
            if s.start < row.end {
                s.scheduled = s.scheduled.max(row.end.min(s.end()) - s.start);
            }
            if s.start <= row.first_write {
                return;
            }
            segment = s.parent;
        }
    }

    /// Takes back what `row` and later rows of its sequence have scheduled.
    fn unschedule(&mut self, row: &Row) {
        let sequence = &mut self.sequences[row.slot];
        sequence.scheduled = sequence.scheduled.min(row.start);
        if row.first_write == row.end {
            return;
        }
        let mut segment = sequence.leaf;
        loop {
            let s = &mut self.segments[segment];
            if s.writer == row.slot {
                let kept = row.first_write.saturating_sub(s.start);
                s.scheduled = s.scheduled.min(kept).max(s.filled);
            }
            if s.start <= row.first_write {
                return;
            }
            segment = s.parent;
        }
    }

    /// Counts the tokens `[begin, end)` of a sequence as written.
    pub(super) fn mark_filled(&mut self, slot: u32, begin: u32, end: u32) {
        if begin >= end {
            return;
        }
        let mut segment = self.sequences[slot].leaf;
        loop {
            let s = &mut self.segments[segment];
            if s.start < end {
                s.filled = s.filled.max(end.min(s.start + s.len) - s.start);
                s.scheduled = s.scheduled.max(s.filled);
                if s.filled == s.len {
                    s.writer = NIL;
                }
            }
            if s.start <= begin {
                return;
            }
            segment = s.parent;
        }
    }

    /// Counts what a step has written, and closes it. Steps are committed in the order in which
    /// they began.
    ///
    /// # Errors
    /// [`Error::ClosedPlan`] if the step is closed; [`Error::AbandonedPlan`] if it builds on one that
    /// was aborted (it then stays open until it is aborted too); [`Error::InvalidConfig`] if an earlier
    /// one is still open. Nothing changes then.
    pub fn commit_step(&mut self, step: StepId) -> Result<Committed> {
        self.expire_pins();
        let position = self.steps.position(step)?;
        if self.steps.open[position].is_stale() {
            return Err(Error::AbandonedPlan { plan: step.0 });
        }
        let mut earlier = self.steps.open.iter().take(position);
        if let Some(first) = earlier.find(|step| !step.is_stale()) {
            let allowed = format!("step {}, which began before it and is open", first.id);
            return Err(Error::invalid("step", step.0, allowed));
        }
        let rows = std::mem::take(&mut self.steps.open[position].rows);
        let mut committed = Committed::default();
        for row in &rows {
            let sequence = &mut self.sequences[row.slot];
            sequence.computed = sequence.computed.max(row.end);
            self.mark_filled(row.slot, row.first_write, row.end);
        }
        for row in &rows {
            if self.sequences[row.slot].first_waiter != NIL {
                self.resolve_waits_on(row.slot, &mut committed.copies);
            }
        }
        self.close_step(position, &rows, &mut committed);
        Ok(committed)
    }

    /// Closes a step whose results are not used: nothing counts as written. Steps that began after
    /// it become stale where they build on what it was to compute.
    ///
    /// # Errors
    /// [`Error::ClosedPlan`] if the step is closed.
    pub fn abort_step(&mut self, step: StepId) -> Result<Committed> {
        self.expire_pins();
        let position = self.steps.position(step)?;
        let rows = std::mem::take(&mut self.steps.open[position].rows);
        if !self.steps.open[position].is_stale() {
            for row in &rows {
                self.unschedule(row);
            }
            for later in position + 1..self.steps.open.len() {
                let step = &mut self.steps.open[later];
                if step.is_stale() {
                    continue;
                }
                let rows = std::mem::take(&mut step.rows);
                let stale = !self.schedule_again(&rows);
                let step = &mut self.steps.open[later];
                step.rows = rows;
                step.stale.0.store(stale, Ordering::Release);
            }
        }
        let mut committed = Committed::default();
        self.close_step(position, &rows, &mut committed);
        Ok(committed)
    }

    /// Takes up a step's rows once more after an earlier one was aborted, or takes them back if one
    /// of them builds on what is not computed any more; tells which.
    fn schedule_again(&mut self, rows: &[Row]) -> bool {
        let follows = |row: &Row| row.start <= self.sequences[row.slot].scheduled;
        let builds = rows.iter().all(follows) && {
            for row in rows {
                self.schedule(row);
            }
            rows.iter().all(|row| self.builds_on_scheduled(row))
        };
        if !builds {
            for row in rows {
                self.unschedule(row);
            }
        }
        builds
    }

    fn close_step(&mut self, position: usize, rows: &[Row], committed: &mut Committed) {
        self.steps.open.remove(position);
        for row in rows {
            let sequence = &mut self.sequences[row.slot];
            sequence.open_steps -= 1;
            if sequence.open_steps == 0 && sequence.state == State::Leaving {
                self.journal.structure_version += 1;
                self.drop_sequence(row.slot, &mut committed.inherited);
            }
        }
        let Self { steps, pool, .. } = self;
        steps.release_held(pool);
        self.retain_live_heirs(&mut committed.inherited);
    }

    /// Begins and commits a step at once: for a tree without plans, whose user has written the
    /// next `qo_len` tokens of each sequence.
    ///
    /// # Errors
    /// As [`begin_step`](Self::begin_step); [`Error::InvalidConfig`] if a step is open.
    pub fn commit(&mut self, batch: &[(SeqHandle, u32)]) -> Result<Committed> {
        if let Some(open) = self.steps.open.iter().find(|step| !step.is_stale()) {
            let given = format!("{} sequences while step {} is open", batch.len(), open.id);
            return Err(Error::invalid("batch", given, "no open step: commit or abort it first"));
        }
        let step = self.begin_step(batch)?;
        self.commit_step(step.id)
    }
}
