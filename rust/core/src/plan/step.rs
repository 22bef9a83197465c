//! One step's plan as its owner holds it: which rows, at which positions, written to which slots.

use super::image::Image;
use super::view::{NONE, PlanView, SequenceRow};
use crate::error::{Error, Result};

/// The slot of a row whose K/V is not written.
pub const NO_SLOT: i64 = -1;

/// Where the rows of a step stand, for a version of the tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepRows {
    epoch: u64,
    qo_indptr: Vec<u32>,
    positions: Vec<i64>,
    slot_mapping: Vec<i64>,
}

impl StepRows {
    /// Reads the rows of the tables' current version.
    pub(super) fn new(image: &Image, qo_indptr: Vec<u32>) -> Self {
        let view = image.view();
        let mut positions = vec![0; view.num_qo_rows as usize];
        let mut slot_mapping = vec![NO_SLOT; view.num_qo_rows as usize];
        for &row in view.order {
            fill_rows(&view, &view.sequences[row as usize], &mut positions, &mut slot_mapping);
        }
        Self { epoch: image.version(), qo_indptr, positions, slot_mapping }
    }

    /// The version of the tables that the rows belong to.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Rows of entry `i` of the batch: `qo_indptr[i]..qo_indptr[i + 1]`.
    pub fn qo_indptr(&self) -> &[u32] {
        &self.qo_indptr
    }

    /// For each row its token position in its sequence; 0 for padding.
    pub fn positions(&self) -> &[i64] {
        &self.positions
    }

    /// For each row the slot its K/V is written to, `chunk id * page_size + offset`; -1 for padding and for
    /// tokens that are written already or by another sequence.
    pub fn slot_mapping(&self) -> &[i64] {
        &self.slot_mapping
    }

    /// Rows of `q` and of the output, padding included.
    pub fn num_rows(&self) -> usize {
        self.positions.len()
    }

    /// The tables, if they are still those that the rows were made for.
    ///
    /// # Errors
    /// [`Error::StalePlan`] if a later plan has changed them.
    pub fn view<'a>(&self, image: &'a Image) -> Result<PlanView<'a>> {
        if self.epoch != image.version() {
            return Err(Error::StalePlan { plan: self.epoch, current: image.version() });
        }
        Ok(image.view())
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
