//! One step's plan as its owner holds it: which rows, at which positions, written to which slots.

use super::image::Image;
use super::view::{NONE, PlanView, SequenceRow};
use crate::error::{Error, Result};
use crate::tree::{StepId, StepWatch};

/// The slot of a row whose K/V is not written.
pub const NO_SLOT: i64 = -1;

/// One step: where its rows stand, and the version of the tables that it was made for.
///
/// It is valid until the next plan from the same planner, or until it is closed.
#[derive(Debug)]
pub struct Plan {
    epoch: u64,
    is_open: bool,
    step: Option<StepWatch>,
    qo_indptr: Vec<u32>,
    positions: Vec<i64>,
    slot_mapping: Vec<i64>,
}

impl Plan {
    /// Reads the rows of the tables' current version. `step` is the tree's, if there is one.
    pub(super) fn new(image: &Image, qo_indptr: Vec<u32>, step: Option<StepWatch>) -> Self {
        let view = image.view();
        let mut positions = vec![0; view.num_qo_rows as usize];
        let mut slot_mapping = vec![NO_SLOT; view.num_qo_rows as usize];
        for &row in view.order {
            fill_rows(&view, &view.sequences[row as usize], &mut positions, &mut slot_mapping);
        }
        Self { epoch: image.version(), is_open: true, step, qo_indptr, positions, slot_mapping }
    }

    /// The version of the tables that the plan belongs to.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Moves the plan to another version of the same tables.
    pub(super) fn set_epoch(&mut self, version: u64) {
        self.epoch = version;
    }

    /// Rows of entry `i` of the batch: `qo_indptr[i]..qo_indptr[i + 1]`.
    pub fn qo_indptr(&self) -> &[u32] {
        &self.qo_indptr
    }

    /// For each row its token position in its sequence; 0 for padding.
    pub fn positions(&self) -> &[i64] {
        &self.positions
    }

    /// For each row the slot that its K/V is written to, `chunk id * page_size + offset`; -1 for
    /// padding and for tokens that are written already or by another sequence.
    pub fn slot_mapping(&self) -> &[i64] {
        &self.slot_mapping
    }

    /// Rows of `q` and of the output, padding included.
    pub fn num_rows(&self) -> usize {
        self.positions.len()
    }

    /// The tables, if they are still those that the plan was made for.
    ///
    /// # Errors
    /// As [`Plan::check`].
    pub fn view<'a>(&self, image: &'a Image) -> Result<PlanView<'a>> {
        self.check(image.version())?;
        Ok(image.view())
    }

    /// Checks that an image at `version`, the planner's or a copy of it, holds this plan's tables.
    ///
    /// # Errors
    /// [`Error::ClosedPlan`]; [`Error::StalePlan`] if a later one has changed the image;
    /// [`Error::AbandonedPlan`] if it builds on a step that was aborted, whose K/V is never written.
    pub fn check(&self, version: u64) -> Result<()> {
        if !self.is_open {
            return Err(Error::ClosedPlan { plan: self.epoch });
        }
        if self.epoch != version {
            return Err(Error::StalePlan { plan: self.epoch });
        }
        if self.is_stale() {
            return Err(Error::AbandonedPlan { plan: self.epoch });
        }
        Ok(())
    }

    /// Whether it builds on an earlier plan that was aborted, so that it can only be aborted too.
    pub fn is_stale(&self) -> bool {
        self.step.as_ref().is_some_and(StepWatch::is_stale)
    }

    /// Whether the plan was not closed yet.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// The tree's step; `None` over block tables, or once closed.
    pub fn step(&self) -> Option<StepId> {
        self.step.as_ref().map(StepWatch::step)
    }

    /// Ends the plan. Returns the tree's step for the caller to commit or abort; `None` if there
    /// is none, as over block tables, or if the plan was closed before.
    pub fn close(&mut self) -> Option<StepId> {
        self.is_open = false;
        self.step.take().map(|watch| watch.step())
    }
}

/// Fills the rows of one sequence from its last to its first, up its path.
fn fill_rows(
    view: &PlanView<'_>,
    sequence: &SequenceRow,
    positions: &mut [i64],
    slot_mapping: &mut [i64],
) {
    let mut segment = sequence.leaf;
    let rows = sequence.qo_len.min(sequence.kv_len);
    for query in (sequence.qo_len - rows..sequence.qo_len).rev() {
        let position = sequence.kv_len - (sequence.qo_len - query);
        let row = (sequence.qo_begin + query) as usize;
        positions[row] = i64::from(position);
        if query < sequence.num_cached_rows {
            continue;
        }
        while let Some(above) = view.segments.get(segment as usize)
            && above.start_pos > position
            && above.parent != NONE
        {
            segment = above.parent;
        }
        if let Some(segment) = view.segments.get(segment as usize) {
            let offset = position - segment.start_pos;
            let page = view.page_ids[(segment.ids_begin + offset / view.page_size) as usize];
            let slot = offset % view.page_size;
            slot_mapping[row] = i64::from(page) * i64::from(view.page_size) + i64::from(slot);
        }
    }
}
