//! Keeps the items of a planner's steps, cutting anew only where it must.

use super::super::image::Image;
use super::super::layout::WorkLimits;
use super::super::view::{NONE, PlanView};
use super::costs::{DeviceCosts, HeadShape};
use super::row::ItemRow;
use super::slices::{Slices, Terms};
use super::tiles::Tiles;
use super::work::Work;
use crate::error::Result;

/// A leaf's last slice may grow until it takes this much of the longest block's time more than when
/// it was cut; then all is cut anew.
const MAX_GROWTH: f32 = 0.25;

/// A leaf's open slices: the first of its items, and when they are too long.
#[derive(Debug, Clone, Copy)]
struct Tail {
    first_item: u32,
    /// Pages of the segment from which on it is cut anew.
    max_pages: u32,
}

const NO_TAIL: Tail = Tail { first_item: NONE, max_pages: 0 };

/// Cuts the steps of one planner into work items, for one head shape on one device.
#[derive(Debug)]
pub struct Cutter {
    shape: HeadShape,
    costs: DeviceCosts,
    tiles: Tiles,
    slices: Slices,
    work: Work,
    /// By segment row.
    tails: Vec<Tail>,
    /// For each item the next one of its leaf's tail.
    next_item: Vec<u32>,
    /// For each place in `order` the least number of keys before its first query, that query
    /// included, with which the items are right: [`NONE`] where they depend on the length.
    min_keys: Vec<u32>,
    /// Whether the sequences of the last cut had as many.
    was_steady: bool,
}

impl Cutter {
    /// A cutter that has cut nothing yet.
    ///
    /// # Errors
    /// As [`DeviceCosts::check`].
    pub fn new(shape: HeadShape, costs: DeviceCosts) -> Result<Self> {
        costs.check()?;
        Ok(Self {
            shape,
            costs,
            tiles: Tiles::default(),
            slices: Slices::default(),
            work: Work::default(),
            tails: Vec::new(),
            next_item: Vec::new(),
            min_keys: Vec::new(),
            was_steady: false,
        })
    }

    /// The head shape that it cuts for.
    pub fn shape(&self) -> HeadShape {
        self.shape
    }

    /// The device's constants.
    pub fn costs(&self) -> DeviceCosts {
        self.costs
    }

    /// The last cut.
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// Cuts a step. Pages are a multiple of 16 tokens.
    ///
    /// ```
    /// use chunkcache::plan::{Cutter, DeviceCosts, HeadShape, plan_from_block_tables};
    ///
    /// let table: [u32; 4] = [0, 1, 0, 2];
    /// let lens: [u32; 2] = [20, 31];
    /// let (planner, plan) = plan_from_block_tables(&table, 2, &lens, 16, None)?;
    /// let mut cutter = Cutter::new(HeadShape::new(1, 1, 8, false)?, DeviceCosts::default())?;
    /// let work = cutter.cut(&plan.view(planner.image())?);
    /// assert_eq!(work.items.len(), 3); // the shared page, and each sequence's own
    /// # Ok::<(), chunkcache::error::Error>(())
    /// ```
    pub fn cut(&mut self, view: &PlanView<'_>) -> &Work {
        let unbounded =
            WorkLimits { max_items: u32::MAX, max_rows: u32::MAX, max_merges: u32::MAX };
        self.cut_within(view, unbounded);
        &self.work
    }

    fn cut_within(&mut self, view: &PlanView<'_>, limits: WorkLimits) {
        let (shape, costs) = (self.shape, self.costs);
        let terms = Terms { shape, costs, page_size: view.page_size, limits };
        self.tiles.read(view, &shape);
        self.slices.choose(&self.tiles.kinds, &terms);
        self.work.build(view, &self.tiles, &self.slices, &terms);
    }

    /// Cuts the image's step, which fits, and writes what differs from the last.
    pub(in crate::plan) fn recut(&mut self, image: &mut Image) {
        let limits = image.layout().work;
        self.cut_within(&image.view(), limits);
        self.note_tails(&image.view());
        self.note_min_keys(&image.view());
        self.was_steady = self.has_min_keys(&image.view());
        image.set_work(&self.work);
    }

    /// Whether the items of the last cut are right for the image's sequences, whose structure and
    /// query rows have not changed since: true while all decode in leaves of their own.
    pub(in crate::plan) fn is_steady(&self, view: &PlanView<'_>) -> bool {
        self.was_steady && self.has_min_keys(view)
    }

    fn has_min_keys(&self, view: &PlanView<'_>) -> bool {
        let rows = view.order.iter().map(|&row| view.sequences[row as usize]);
        rows.zip(&self.min_keys)
            .all(|(row, &min_keys)| min_keys != NONE && row.kv_len + 1 >= min_keys + row.qo_len)
    }

    /// Takes over the pages `begin..end` that a leaf segment has gained; false, with the items
    /// unchanged, if its last slice has become too long.
    pub(in crate::plan) fn grow(
        &mut self,
        image: &mut Image,
        row: u32,
        begin: u32,
        end: u32,
    ) -> bool {
        let tail = self.tails.get(row as usize).copied().unwrap_or(NO_TAIL);
        if tail.first_item == NONE || end > tail.max_pages {
            return false;
        }
        let ids_begin = image.segment(row).ids_begin;
        let mut item = tail.first_item;
        while item != NONE {
            let first = image.item(item).ids_begin - ids_begin;
            for page in begin.max(first)..end.min(first + ItemRow::PAGES as u32) {
                let id = image.page_id(ids_begin + page);
                image.set_item_page(item, (page - first) as usize, id);
            }
            item = self.next_item[item as usize];
        }
        true
    }

    fn note_tails(&mut self, view: &PlanView<'_>) {
        self.tails.fill(NO_TAIL);
        self.next_item.clear();
        self.next_item.resize(self.work.items.len(), NONE);
        let allowed = MAX_GROWTH * self.slices.span;
        for (index, (item, &tile)) in self.work.items.iter().zip(&self.work.tile_of).enumerate() {
            if item.num_keys != NONE {
                continue;
            }
            let tile = &self.tiles.tiles[tile as usize];
            let row = tile.segment as usize;
            if self.tails.len() <= row {
                self.tails.resize(row + 1, NO_TAIL);
            }
            let cut = tile.kind.cut(&self.shape, tile.kind.keys);
            let per_key = item.num_heads as f32 * cut.key_cost(&self.costs);
            let spare = ((allowed / per_key) as u32 / view.page_size).max(1);
            let tail = &mut self.tails[row];
            let max_pages = view.segments[row].num_pages.saturating_add(spare);
            let is_first = tail.first_item == NONE;
            tail.max_pages = if is_first { max_pages } else { tail.max_pages.min(max_pages) };
            self.next_item[index] = std::mem::replace(&mut tail.first_item, index as u32);
        }
    }

    fn note_min_keys(&mut self, view: &PlanView<'_>) {
        self.min_keys.clear();
        self.min_keys.extend(view.order.iter().map(|&row| {
            let sequence = view.sequences[row as usize];
            match view.segments.get(sequence.leaf as usize) {
                _ if sequence.qo_len == 0 => 0,
                Some(leaf) if leaf.seq_end - leaf.seq_begin == 1 => leaf.start_pos,
                _ => NONE,
            }
        }));
    }
}
