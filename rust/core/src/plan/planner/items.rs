//! The work items of a planner's steps: their capacities, and when they are cut anew.

use super::super::items::{Cutter, room_of, room_of_spans};
use super::super::layout::WorkLimits;
use super::super::source::Query;
use super::super::step::Plan;
use super::Planner;
use crate::error::Result;

impl Planner {
    /// The cutter of the tables' work items, if they have any.
    pub fn cutter(&self) -> Option<&Cutter> {
        self.cutter.as_deref()
    }

    /// Cuts the current step anew with another cutter, such as for another head shape, as a version
    /// of its own in which nothing else changes. Plans of the version before are stale, but for
    /// `plan`, which is of the new one.
    ///
    /// # Errors
    /// [`Error::StalePlan`] if the plan is not the current one; [`Error::InvalidConfig`] if its
    /// items do not fit. Nothing changes then.
    pub fn set_cutter(&mut self, plan: Option<&mut Plan>, cutter: Cutter) -> Result<()> {
        if let Some(plan) = &plan {
            plan.check(self.image.version())?;
        }
        self.room = room_of(&self.image.view(), &cutter.shape());
        self.room.check(&self.image.layout().work)?;
        self.image.begin_amendment();
        self.cutter.insert(Box::new(cutter)).recut(&mut self.image);
        if let Some(plan) = plan {
            plan.set_epoch(self.image.version());
        }
        Ok(())
    }

    /// The least capacities of the work items' sections that hold the last step that was planned,
    /// or refused; none if it would pass 2^32.
    pub fn work_needed(&self) -> Option<WorkLimits> {
        self.room.limits()
    }

    /// Brings the work items up to date; `keeps` says that at most leaves have grown.
    pub(super) fn update_items(&mut self, keeps: bool) {
        let Some(cutter) = &mut self.cutter else { return };
        let (members, growths) = (&self.members, &self.scratch.growths);
        let image = &mut self.image;
        let is_kept = keeps
            && cutter.is_steady(&image.view())
            && growths.iter().all(|growth| {
                let row = members[growth.member as usize].last_row;
                let end = image.segment(row).num_pages;
                cutter.grow(image, row, end - (growth.end - growth.begin), end)
            });
        if !is_kept {
            cutter.recut(image);
        }
    }

    /// Whether the sequences of the batch have the query rows that they had.
    pub(super) fn has_same_rows(&self, queries: &[Query], num_qo_rows: u32) -> bool {
        let view = self.image.view();
        view.num_qo_rows == num_qo_rows
            && self.members.iter().zip(queries).all(|(member, query)| {
                let row = view.sequences[member.row as usize];
                (row.qo_begin, row.qo_len) == (query.qo_begin, query.qo_len)
            })
    }

    pub(super) fn check_room_when_grown(
        &mut self,
        queries: &[Query],
        num_qo_rows: u32,
    ) -> Result<()> {
        let Some(shape) = self.cutter.as_ref().map(|cutter| cutter.shape()) else { return Ok(()) };
        let mut qo_lens = vec![0; queries.len()];
        for (member, query) in self.members.iter().zip(queries) {
            qo_lens[member.place as usize] = query.qo_len;
        }
        let view = self.image.view();
        let rows = view.segment_order.iter().map(|&row| view.segments[row as usize]);
        let spans = rows.map(|row| (row.seq_begin, row.seq_end));
        let block = |chunk: u32| (chunk - 1) / self.arena.block_len();
        let new = self.scratch.growths.iter().flat_map(|growth| {
            let place = self.members[growth.member as usize].place;
            (block(growth.begin)..block(growth.end)).map(move |_| (place, place + 1))
        });
        self.room = room_of_spans(&shape, num_qo_rows, &qo_lens, spans.chain(new));
        self.room.check(&self.image.layout().work)
    }

    pub(super) fn check_room_of_structure(
        &mut self,
        queries: &[Query],
        num_qo_rows: u32,
    ) -> Result<()> {
        let Some(shape) = self.cutter.as_ref().map(|cutter| cutter.shape()) else { return Ok(()) };
        let order = self.forest.order.iter();
        let qo_lens: Vec<u32> = order.map(|&index| queries[index as usize].qo_len).collect();
        let spans = self.scratch.pieces.iter().map(|piece| {
            let strip = &self.forest.strips[piece.strip as usize];
            (strip.seq_begin, strip.seq_end)
        });
        self.room = room_of_spans(&shape, num_qo_rows, &qo_lens, spans);
        self.room.check(&self.image.layout().work)
    }
}
