//! Plans over somebody else's paged cache, made from its block tables.

use super::image::{Image, check_page_size};
use super::indices::{Index, MAX_QO_ROWS, check_ids, parse_indptr, same_ids};
use super::items::{Cutter, room_of};
use super::layout::{Limits, WorkLimits};
use super::page_table::{PageRow, PageTable};
use super::shared_pages::SharedPages;
use super::step::Plan;
use super::view::{NONE, SegmentRow, SequenceRow};
use crate::error::{Error, Result};

/// Pages of work items are a multiple of so many tokens.
pub(super) const ITEM_PAGE_SIZE: u32 = 16;

/// Capacities of work items that tables get at least, if they get any.
const USUAL_WORK: WorkLimits =
    WorkLimits { max_items: 1 << 13, max_rows: 1 << 10, max_merges: 1 << 14 };

/// Keeps the tables of the steps of a paged cache that others manage.
///
/// Sequence `i` of the batch has row `i` of `sequences`, row `i` of `segments` for the pages of
/// its own, and its pages in `page_ids[i * max_pages..]`. Pages that several sequences start with
/// are found by their ids; only pages that are full in all of these count.
#[derive(Debug)]
pub struct BlockTablePlanner {
    image: Image,
    page_size: u32,
    max_pages: u32,
    shared: SharedPages,
    held: Vec<Held>,
    /// Cuts the steps into work items, once it is set.
    cutter: Option<Box<Cutter>>,
    /// A buffer for the ids of one sequence.
    ids: Vec<u32>,
}

/// A sequence of the current step.
#[derive(Debug, Clone, Copy)]
struct Held {
    num_pages: u32,
    kv_len: u32,
    /// Its place in the order.
    place: u32,
    /// Pages that it shares.
    num_shared: u32,
    /// The segment row of the last page that it shares, or [`NONE`].
    shared_row: u32,
}

impl Held {
    fn has_own_pages(&self) -> bool {
        self.num_pages > self.num_shared
    }
}

impl BlockTablePlanner {
    /// Tables for batches of up to `max_sequences` sequences of up to `max_pages` pages of
    /// `page_size` tokens each.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if one of them is 0 or the tables would pass 2^32 words.
    pub fn new(page_size: u32, max_sequences: u32, max_pages: u32) -> Result<Self> {
        if max_pages == 0 {
            return Err(Error::invalid("max_pages", max_pages, "at least 1"));
        }
        let max_page_ids = max_sequences.checked_mul(max_pages).ok_or_else(|| {
            let given = format!("{max_sequences} times {max_pages} pages");
            Error::invalid("max_sequences", given, "fewer than 2^32 page ids")
        })?;
        let max_segments = max_sequences.saturating_mul(2);
        let limits = Limits { max_sequences, max_segments, max_page_ids };
        let image = Image::new(page_size, limits)?;
        Ok(Self {
            image,
            page_size,
            max_pages,
            shared: SharedPages::default(),
            held: Vec::new(),
            cutter: None,
            ids: Vec::new(),
        })
    }

    /// Tokens per page.
    pub fn page_size(&self) -> u32 {
        self.page_size
    }

    /// Pages of one sequence at most.
    pub fn max_pages(&self) -> u32 {
        self.max_pages
    }

    /// The cutter of the steps' work items, once it is set.
    pub fn cutter(&self) -> Option<&Cutter> {
        self.cutter.as_deref()
    }

    /// Cuts the current step, that of `plan`, and those to come into work items, which then are in
    /// the same tables. Where these have no room for them they get larger ones, as they do for
    /// later steps: another image.
    ///
    /// # Errors
    /// [`Error::StalePlan`] if the plan is not the current one; [`Error::InvalidConfig`] for pages
    /// that are no multiple of 16 tokens, and for tables that would pass 2^32 words.
    pub fn set_cutter(&mut self, plan: &mut Plan, cutter: Cutter) -> Result<()> {
        plan.check(self.image.version())?;
        if !self.page_size.is_multiple_of(ITEM_PAGE_SIZE) {
            return Err(Error::invalid("page_size", self.page_size, "a multiple of 16"));
        }
        self.make_room(&cutter)?;
        self.image.begin_amendment();
        self.cutter.insert(Box::new(cutter)).recut(&mut self.image);
        plan.set_epoch(self.image.version());
        Ok(())
    }

    fn make_room(&mut self, cutter: &Cutter) -> Result<()> {
        let held = self.image.layout().work;
        let room = room_of(&self.image.view(), &cutter.shape());
        if room.check(&held).is_ok() && held.max_items > 0 {
            return Ok(());
        }
        let needed = room
            .limits()
            .ok_or_else(|| Error::invalid("batch", "a step of 2^32 work items or more", "fewer"))?;
        // Finer cuts than the coarsest are to fit, and the next steps.
        self.image = self.image.with_room(USUAL_WORK.enlarged(held).enlarged(needed))?;
        Ok(())
    }

    /// The tables.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Makes the tables of the next step. Sequence `i` has the rows `qo_indptr[i]..qo_indptr[i + 1]` of
    /// `q`, or row `i` alone without `qo_indptr`, and they stand for its last tokens.
    ///
    /// The shared pages of the last step are used again where every sequence still starts with
    /// the full pages that it had.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for tables that do not fit each other or the capacities, negative
    /// ids or lengths, or more query tokens than a sequence has tokens. The tables are unchanged
    /// then.
    pub fn update<T: Index>(
        &mut self,
        table: &PageTable<'_, T>,
        qo_indptr: Option<&[T]>,
    ) -> Result<Plan> {
        self.next(table, qo_indptr, false)
    }

    /// [`BlockTablePlanner::update`] for a batch whose sequences only grew since the last step, in
    /// time that does not depend on their lengths: the full pages of the last step are taken to
    /// be unchanged and not compared. A batch of another size, or with a sequence that is shorter
    /// than it was, is planned anew.
    ///
    /// # Errors
    /// As [`BlockTablePlanner::update`].
    pub fn update_grown<T: Index>(
        &mut self,
        table: &PageTable<'_, T>,
        qo_indptr: Option<&[T]>,
    ) -> Result<Plan> {
        self.next(table, qo_indptr, true)
    }

    fn next<T: Index>(
        &mut self,
        table: &PageTable<'_, T>,
        qo_indptr: Option<&[T]>,
        trust_pages: bool,
    ) -> Result<Plan> {
        let rows = table.rows(self.page_size)?;
        let qo_indptr = self.check(&rows, qo_indptr)?;
        let same_rows = self.has_rows(&qo_indptr);
        let only_grew = self.held.len() == rows.len()
            && self.held.iter().enumerate().zip(&rows).all(|((index, held), row)| {
                let full = (held.kv_len / self.page_size) as usize;
                row.kv_len >= held.kv_len
                    && (trust_pages || same_ids(self.pages(index, full), &row.pages[..full]))
            });
        let keep = |index: usize| match only_grew {
            true => (self.held[index].kv_len / self.page_size) as usize,
            false => 0,
        };
        let kept: Vec<usize> = (0..rows.len()).map(keep).collect();
        for (row, &kept) in rows.iter().zip(&kept) {
            check_ids(&row.pages[kept..], |index| table.name_of(row.begin + kept + index))?;
        }
        let lengths = rows.iter().enumerate().take(self.held.len());
        self.image.begin_step(lengths.map(|(index, row)| (index as u32, row.kv_len)));
        for (index, (row, &kept)) in rows.iter().zip(&kept).enumerate() {
            self.ids.clear();
            self.ids.extend(row.pages[kept..].iter().map(|&id| id.try_into().unwrap_or(NONE)));
            self.image.set_page_ids(index * self.max_pages as usize + kept, &self.ids);
        }
        let is_same = if only_grew { self.grow(&rows) } else { self.restructure(&rows) };
        self.write_sequences(&qo_indptr);
        self.update_items(is_same && same_rows, &kept)?;
        Ok(Plan::new(&self.image, qo_indptr, None))
    }

    /// Whether the sequences of the last step had these rows.
    fn has_rows(&self, qo_indptr: &[u32]) -> bool {
        let view = self.image.view();
        let has = |(row, span): (&SequenceRow, &[u32])| {
            (row.qo_begin, row.qo_len) == (span[0], span[1] - span[0])
        };
        view.order.len() + 1 == qo_indptr.len()
            && view.sequences.iter().zip(qo_indptr.windows(2)).all(has)
    }

    /// Brings the work items up to date. `keeps` says that no segment has come or gone since the
    /// last step, and the first `kept[i]` pages of sequence `i` are those that it had.
    fn update_items(&mut self, keeps: bool, kept: &[usize]) -> Result<()> {
        let Some(mut cutter) = self.cutter.take() else { return Ok(()) };
        let image = &mut self.image;
        let is_kept = keeps
            && cutter.is_steady(&image.view())
            && self.held.iter().zip(kept).enumerate().all(|(index, (held, &kept))| {
                // The page after those may be another one now, even where none was added.
                let first = (kept as u32).max(held.num_shared) - held.num_shared;
                let end = held.num_pages - held.num_shared;
                first >= end || cutter.grow(image, index as u32, first, end)
            });
        if !is_kept {
            self.make_room(&cutter)?;
            cutter.recut(&mut self.image);
        }
        self.cutter = Some(cutter);
        Ok(())
    }

    /// Checks what the tables' capacities and the queries ask of the batch.
    fn check<T: Index>(
        &self,
        rows: &[PageRow<'_, T>],
        qo_indptr: Option<&[T]>,
    ) -> Result<Vec<u32>> {
        let max_sequences = self.image.layout().limits.max_sequences as usize;
        if rows.len() > max_sequences {
            let given = format!("{} sequences", rows.len());
            let allowed = format!("at most max_sequences = {max_sequences}");
            return Err(Error::invalid("seq_lens", given, allowed));
        }
        let qo_indptr = match qo_indptr {
            Some(given) => parse_indptr("qo_indptr", given, rows.len(), MAX_QO_ROWS)?,
            None => (0..=rows.len() as u32).collect(),
        };
        for (index, (row, span)) in rows.iter().zip(qo_indptr.windows(2)).enumerate() {
            if row.pages.len() > self.max_pages as usize {
                let given = format!("{} pages", row.pages.len());
                let allowed = format!("at most max_pages = {}", self.max_pages);
                return Err(Error::invalid(format!("seq_lens[{index}]"), given, allowed));
            }
            let qo_len = span[1] - span[0];
            if qo_len > row.kv_len && row.kv_len > 0 {
                let given = format!("{qo_len} query tokens for sequence {index}");
                let allowed = format!("at most its {} tokens, or a sequence of 0", row.kv_len);
                return Err(Error::invalid(format!("qo_indptr[{}]", index + 1), given, allowed));
            }
        }
        Ok(qo_indptr)
    }

    fn pages(&self, index: usize, num_pages: usize) -> &[u32] {
        let begin = index * self.max_pages as usize;
        &self.image.view().page_ids[begin..begin + num_pages]
    }

    /// Longer sequences, same shared pages. Whether the segments are those that there were.
    fn grow<T>(&mut self, rows: &[PageRow<'_, T>]) -> bool {
        let mut is_same = true;
        for (index, row) in rows.iter().enumerate() {
            let held = &mut self.held[index];
            let had_own_pages = held.has_own_pages();
            held.num_pages = row.pages.len() as u32;
            held.kv_len = row.kv_len;
            let is_new = held.has_own_pages() && !had_own_pages;
            self.write_own_segment(index);
            if is_new {
                let num_segments = self.image.view().segment_order.len();
                self.image.set_segment_order(num_segments, &[index as u32]);
                is_same = false;
            }
        }
        is_same
    }

    /// Finds the shared pages anew; false, since the segments are others.
    fn restructure<T>(&mut self, rows: &[PageRow<'_, T>]) -> bool {
        let view = self.image.view();
        let (page_size, max_pages) = (self.page_size, self.max_pages as usize);
        self.shared.find(rows.len(), |sequence| {
            let begin = sequence as usize * max_pages;
            let num_full = (rows[sequence as usize].kv_len / page_size) as usize;
            &view.page_ids[begin..begin + num_full]
        });
        let max_sequences = self.image.layout().limits.max_sequences;
        let runs = &self.shared.runs;
        let row_of = |run: u32| runs.get(run as usize).map_or(NONE, |run| max_sequences + run.key);
        let mut segment_order = Vec::with_capacity(runs.len() + rows.len());
        for run in runs {
            let owner = self.shared.order[run.seq_begin as usize] as usize;
            let row = max_sequences + run.key;
            self.image.set_segment(
                row,
                SegmentRow {
                    parent: row_of(run.parent),
                    seq_begin: run.seq_begin,
                    seq_end: run.seq_end,
                    start_pos: run.begin * page_size,
                    num_pages: run.end - run.begin,
                    ids_begin: (owner * max_pages) as u32 + run.begin,
                },
            );
            segment_order.push(row);
        }
        self.held.clear();
        self.held.extend(rows.iter().zip(&self.shared.last_run).map(|(row, &run)| Held {
            num_pages: row.pages.len() as u32,
            kv_len: row.kv_len,
            place: 0,
            num_shared: runs.get(run as usize).map_or(0, |run| run.end),
            shared_row: row_of(run),
        }));
        for (place, &sequence) in self.shared.order.iter().enumerate() {
            self.held[sequence as usize].place = place as u32;
        }
        for index in 0..rows.len() {
            if self.held[index].has_own_pages() {
                self.write_own_segment(index);
                segment_order.push(index as u32);
            }
        }
        self.image.set_segment_order(0, &segment_order);
        self.image.set_order(&self.shared.order);
        false
    }

    /// Writes the segment of the pages that sequence `index` has for itself, if it has any.
    fn write_own_segment(&mut self, index: usize) {
        let held = &self.held[index];
        if !held.has_own_pages() {
            return;
        }
        self.image.set_segment(
            index as u32,
            SegmentRow {
                parent: held.shared_row,
                seq_begin: held.place,
                seq_end: held.place + 1,
                start_pos: held.num_shared * self.page_size,
                num_pages: held.num_pages - held.num_shared,
                ids_begin: index as u32 * self.max_pages + held.num_shared,
            },
        );
    }

    fn write_sequences(&mut self, qo_indptr: &[u32]) {
        for (index, (held, span)) in self.held.iter().zip(qo_indptr.windows(2)).enumerate() {
            let own = index as u32;
            self.image.set_sequence(
                own,
                SequenceRow {
                    leaf: if held.has_own_pages() { own } else { held.shared_row },
                    qo_begin: span[0],
                    qo_len: span[1] - span[0],
                    kv_len: held.kv_len,
                    num_cached_rows: 0,
                },
            );
        }
        self.image.set_num_qo_rows(qo_indptr.last().copied().unwrap_or(0));
    }
}

/// Tables for one batch, as large as it needs, from a block table `[num_sequences, width]` and
/// the tokens of each sequence.
///
/// # Errors
/// As [`BlockTablePlanner::new`] and [`BlockTablePlanner::update`].
pub fn plan_from_block_tables<T: Index>(
    block_table: &[T],
    width: usize,
    seq_lens: &[T],
    page_size: u32,
    qo_indptr: Option<&[T]>,
) -> Result<(BlockTablePlanner, Plan)> {
    plan_once(&PageTable::Dense { block_table, width, seq_lens }, page_size, qo_indptr)
}

/// Tables for one batch, as large as it needs, from FlashInfer's three arrays.
///
/// # Errors
/// As [`BlockTablePlanner::new`] and [`BlockTablePlanner::update`].
pub fn plan_from_csr<T: Index>(
    kv_indptr: &[T],
    kv_indices: &[T],
    kv_last_page_len: &[T],
    page_size: u32,
    qo_indptr: Option<&[T]>,
) -> Result<(BlockTablePlanner, Plan)> {
    plan_once(&PageTable::Csr { kv_indptr, kv_indices, kv_last_page_len }, page_size, qo_indptr)
}

fn plan_once<T: Index>(
    table: &PageTable<'_, T>,
    page_size: u32,
    qo_indptr: Option<&[T]>,
) -> Result<(BlockTablePlanner, Plan)> {
    check_page_size(page_size)?;
    let rows = table.rows(page_size)?;
    let max_pages = rows.iter().map(|row| row.pages.len()).max().unwrap_or(0).max(1);
    let mut planner =
        BlockTablePlanner::new(page_size, rows.len().max(1) as u32, max_pages as u32)?;
    let step = planner.update(table, qo_indptr)?;
    Ok((planner, step))
}
