//! What a step needs at least of the work items' sections.

use super::super::layout::WorkLimits;
use super::super::view::PlanView;
use super::costs::{HeadShape, WARP_ROWS};
use crate::error::{Error, Result};

/// Room that a step needs at least, however coarsely it is cut.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::plan) struct Room {
    num_items: u64,
    num_rows: u64,
    num_merges: u64,
}

impl Room {
    pub fn new(num_qo_rows: u32) -> Self {
        Self { num_rows: num_qo_rows.into(), ..Self::default() }
    }

    /// Counts a segment that `num_tokens` query tokens of one sequence or several read.
    pub fn add(&mut self, shape: &HeadShape, num_tokens: u32, is_single: bool) {
        if num_tokens == 0 {
            return;
        }
        let num_tiles = num_tokens.div_ceil(shape.max_tokens());
        let rows = num_tokens.div_ceil(num_tiles) * shape.group;
        let warps = shape.warps / rows.div_ceil(WARP_ROWS).next_power_of_two();
        let heads = if is_single { shape.num_kv_heads.min(warps) } else { 1 };
        let runs = shape.num_kv_heads.div_ceil(heads);
        // The last tile may have fewer rows, and so more warps that take turns over the keys.
        let key_groups = if num_tiles > 1 { shape.warps } else { warps / heads };
        self.num_items += u64::from(num_tiles) * u64::from(runs);
        let last = num_tokens - (num_tiles - 1) * num_tokens.div_ceil(num_tiles);
        self.num_merges += u64::from(num_tokens - last) * u64::from(warps / heads);
        self.num_merges += u64::from(last) * u64::from(key_groups);
    }

    /// The capacities that hold the step, [`None`] past 2^32.
    pub fn limits(&self) -> Option<WorkLimits> {
        Some(WorkLimits {
            max_items: self.num_items.try_into().ok()?,
            max_rows: self.num_rows.try_into().ok()?,
            max_merges: self.num_merges.try_into().ok()?,
        })
    }

    /// Checks the room against the capacities.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a step that does not fit.
    pub fn check(&self, limits: &WorkLimits) -> Result<()> {
        let named = [
            ("query rows", "max_rows", self.num_rows, limits.max_rows),
            ("work items", "max_items", self.num_items, limits.max_items),
            ("partial states per head", "max_merges", self.num_merges, limits.max_merges),
        ];
        match named.into_iter().find(|&(_, _, needed, max)| needed > max.into()) {
            Some((what, name, needed, max)) => {
                let given = format!("a step of {needed} {what}");
                Err(Error::invalid("batch", given, format!("at most {name} = {max}")))
            }
            None => Ok(()),
        }
    }
}

/// What the work items of some tables need at least.
pub(in crate::plan) fn room_of(view: &PlanView<'_>, shape: &HeadShape) -> Room {
    let qo_lens: Vec<u32> =
        view.order.iter().map(|&row| view.sequences[row as usize].qo_len).collect();
    let rows = view.segment_order.iter().map(|&row| view.segments[row as usize]);
    let spans = rows.map(|row| (row.seq_begin, row.seq_end));
    room_of_spans(shape, view.num_qo_rows, &qo_lens, spans)
}

/// What work items need at least, from the query tokens by place in `order` and the places that
/// each segment covers.
pub(in crate::plan) fn room_of_spans(
    shape: &HeadShape,
    num_qo_rows: u32,
    qo_lens: &[u32],
    spans: impl Iterator<Item = (u32, u32)>,
) -> Room {
    let mut room = Room::new(num_qo_rows);
    let mut before = vec![0];
    for &len in qo_lens {
        before.push(before[before.len() - 1] + len);
    }
    // Most segments are like the one before.
    let mut last = ((0, false), Room::default());
    for (begin, end) in spans {
        let kind = (before[end as usize] - before[begin as usize], end - begin == 1);
        if kind != last.0 {
            last = (kind, Room::default());
            last.1.add(shape, kind.0, kind.1);
        }
        room.num_items += last.1.num_items;
        room.num_merges += last.1.num_merges;
    }
    room
}
