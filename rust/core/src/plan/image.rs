//! The tables as one array of words, and the journal of what changed in it.
//!
//! # Format
//! A header of 32 words, then ten sections at fixed offsets, each at a multiple of 32 words
//! (128 bytes), so that a kernel that knows the base address of the image finds everything by
//! reading the header once:
//!
//! | header word | meaning |
//! |---|---|
//! | 0 | format, 2 |
//! | 1 | tokens per chunk (page) |
//! | 2 | rows of `q` and of the output, padding included |
//! | 3 | sequences in use: length of `order` |
//! | 4 | segments in use: length of `segment_order` |
//! | 5 | word offset of `order` |
//! | 6 | word offset of `sequences`, rows of 5 words: [`SequenceRow`] |
//! | 7 | word offset of `segment_order` |
//! | 8 | word offset of `segments`, rows of 6 words: [`SegmentRow`] |
//! | 9 | word offset of `page_ids` |
//! | 10, 11, 12 | capacity of `order` and `sequences`; of `segment_order` and `segments`; of `page_ids` |
//! | 13, 14, 15 | items in use; rows of the output that no key reaches; merge items in use |
//! | 16 | word offset of `items`, rows of 32 words: [`ItemRow`](super::ItemRow) |
//! | 17 | word offset of `tokens`, rows of 4 words: [`TokenRow`](super::TokenRow) |
//! | 18 | word offset of `merges`, rows of 2 words: [`MergeRow`](super::MergeRow) |
//! | 19 | word offset of `pad_rows` |
//! | 20, 21, 22 | capacity of `items`; of `tokens` and `pad_rows`; of `merges`: 0 without items |
//! | 23 | query tokens |
//! | 24 | word offset of `merge_items`, rows of 4 words: [`MergeItem`](super::MergeItem) |
//! | 25 to 31 | 0 |
//!
//! Words past the end of `order` and `segment_order`, and rows that these do not name, hold
//! whatever they held last. Offsets and capacities never change, so that addresses taken from
//! them stay valid for the life of the image.
//!
//! # Versions
//! Each plan makes the next version of the image. A copy that stands at an older version is
//! brought up to date by a [`Diff`](super::Diff): first, where the diff says so, every sequence
//! that the *old* `order` names advances, `kv_len += qo_len`; then the changed words are
//! overwritten. The image itself is changed by that same rule, so that a decode step without a
//! structural change has nothing to overwrite. A copy of an image begins as zeros, at version 0.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use super::indices::common_prefix;
use super::items::{ItemRow, Work};
use super::layout::{HEADER_WORDS, Layout, Limits, WorkLimits, header};
use super::view::{PlanView, Row, SegmentRow, SequenceRow};
use crate::error::{Error, Result};
use crate::tree::MAX_CHUNK_SIZE;

/// Versions that the journal reaches back; a copy that is further behind gets whole blocks.
pub(super) const JOURNAL_VERSIONS: usize = 8;

/// Words of a block of which only the last version that changed it is known.
pub(super) const BLOCK_WORDS: usize = 128;

/// The value of the header's format word.
const FORMAT: u32 = 2;

/// Words of the work tables that are compared at a time.
const WORK_STRIDE: usize = 64;

/// Field of [`SequenceRow`] that a step advances.
const KV_LEN: usize = 3;
const QO_LEN: usize = 2;

/// What one version changed.
#[derive(Debug, Default)]
pub(super) struct Change {
    /// Every sequence of the version before advanced by its query tokens.
    pub advance: bool,
    /// Half-open word ranges in the order of writing; they may overlap.
    pub ranges: Vec<(u32, u32)>,
}

/// The tables of the current step, in words, with the changes of the last few versions.
#[derive(Debug)]
pub struct Image {
    id: u64,
    words: Vec<u32>,
    layout: Layout,
    version: u64,
    /// The changes that made the last versions, the youngest at the back.
    journal: VecDeque<Change>,
    /// For each block of [`BLOCK_WORDS`] words, the last version that wrote to it; 0 if none has, so
    /// that all of it is 0.
    written_at: Vec<u64>,
    /// For each sequence row, the last version in which it advanced.
    advanced_at: Vec<u64>,
}

impl Image {
    /// An image of no sequences and without work items, at version 1.
    ///
    /// # Errors
    /// As [`Image::with_work`].
    pub fn new(page_size: u32, limits: Limits) -> Result<Self> {
        Self::with_work(page_size, limits, WorkLimits::default())
    }

    /// An image of no sequences, at version 1.
    ///
    /// # Errors
    /// As [`Layout::with_work`]; [`Error::InvalidConfig`] if `page_size` is not from 1 to 2^20.
    pub fn with_work(page_size: u32, limits: Limits, work: WorkLimits) -> Result<Self> {
        check_page_size(page_size)?;
        let layout = Layout::with_work(limits, work)?;
        let mut words = vec![0; layout.num_words];
        let fixed = [
            (header::FORMAT, FORMAT),
            (header::PAGE_SIZE, page_size),
            (header::ORDER, layout.order as u32),
            (header::SEQUENCES, layout.sequences as u32),
            (header::SEGMENT_ORDER, layout.segment_order as u32),
            (header::SEGMENTS, layout.segments as u32),
            (header::PAGE_IDS, layout.page_ids as u32),
            (header::MAX_SEQUENCES, limits.max_sequences),
            (header::MAX_SEGMENTS, limits.max_segments),
            (header::MAX_PAGE_IDS, limits.max_page_ids),
            (header::ITEMS, layout.items as u32),
            (header::MERGE_ITEMS, layout.merge_items as u32),
            (header::TOKENS, layout.tokens as u32),
            (header::MERGES, layout.merges as u32),
            (header::PAD_ROWS, layout.pad_rows as u32),
            (header::MAX_ITEMS, work.max_items),
            (header::MAX_ROWS, work.max_rows),
            (header::MAX_MERGES, work.max_merges),
        ];
        for (index, value) in fixed {
            words[index] = value;
        }
        let mut written_at = vec![0; layout.num_words.div_ceil(BLOCK_WORDS)];
        written_at[..HEADER_WORDS.div_ceil(BLOCK_WORDS)].fill(1);
        let advanced_at = vec![0; limits.max_sequences as usize];
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            id,
            words,
            layout,
            version: 1,
            journal: VecDeque::new(),
            written_at,
            advanced_at,
        })
    }

    /// The same tables with other capacities for work items, and no items: an image of its own, at
    /// the same version.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if it would pass 2^32 words.
    pub(super) fn with_room(&self, work: WorkLimits) -> Result<Self> {
        let page_size = self.words[header::PAGE_SIZE];
        let mut image = Self::with_work(page_size, self.layout.limits, work)?;
        // The context tables lie before the items, where they lay.
        let tables = HEADER_WORDS..self.layout.items;
        image.words[tables.clone()].copy_from_slice(&self.words[tables.clone()]);
        let blocks = ..tables.end.div_ceil(BLOCK_WORDS);
        image.written_at[blocks].copy_from_slice(&self.written_at[blocks]);
        image.advanced_at.copy_from_slice(&self.advanced_at);
        for index in [header::NUM_QO_ROWS, header::NUM_SEQUENCES, header::NUM_SEGMENTS] {
            image.words[index] = self.words[index];
        }
        image.version = self.version;
        Ok(image)
    }

    /// A number that no other image of the process has, for copies that follow several.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The version of the tables: 1 when made, one more with each plan.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// All words, in the format that the module describes.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The offsets and capacities of the sections.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The tables as rows.
    pub fn view(&self) -> PlanView<'_> {
        let layout = &self.layout;
        let limits = &layout.limits;
        let section = |begin: usize, words: usize| &self.words[begin..begin + words];
        let num_sequences = self.words[header::NUM_SEQUENCES] as usize;
        let num_segments = self.words[header::NUM_SEGMENTS] as usize;
        let sequence_words = limits.max_sequences as usize * SequenceRow::WORDS;
        let segment_words = limits.max_segments as usize * SegmentRow::WORDS;
        PlanView {
            page_size: self.words[header::PAGE_SIZE],
            num_qo_rows: self.words[header::NUM_QO_ROWS],
            order: section(layout.order, num_sequences),
            sequences: SequenceRow::rows(section(layout.sequences, sequence_words)),
            segment_order: section(layout.segment_order, num_segments),
            segments: SegmentRow::rows(section(layout.segments, segment_words)),
            page_ids: section(layout.page_ids, limits.max_page_ids as usize),
        }
    }

    /// One row of `segments`, without the view of all tables.
    pub(super) fn segment(&self, row: u32) -> SegmentRow {
        let begin = self.layout.segments + row as usize * SegmentRow::WORDS;
        SegmentRow::rows(&self.words[begin..begin + SegmentRow::WORDS])[0]
    }

    /// One page id.
    pub(super) fn page_id(&self, at: u32) -> u32 {
        self.words[self.layout.page_ids + at as usize]
    }

    /// One work item.
    pub(super) fn item(&self, item: u32) -> &ItemRow {
        let begin = self.layout.items + item as usize * ItemRow::WORDS;
        &ItemRow::rows(&self.words[begin..begin + ItemRow::WORDS])[0]
    }

    /// Opens the next version for a step in which the sequence rows given have these `kv_len`:
    /// lengths advance if that is right for more of them than it is wrong.
    pub(super) fn begin_step(&mut self, lengths: impl Iterator<Item = (u32, u32)>) {
        let view = self.view();
        let mut balance = 0_i64;
        for (row, kv_len) in lengths {
            let old = view.sequences[row as usize];
            balance += i64::from(kv_len == old.kv_len.wrapping_add(old.qo_len));
            balance -= i64::from(kv_len == old.kv_len);
        }
        self.begin_version(balance > 0);
    }

    /// Opens a version in which no sequence advances.
    pub(super) fn begin_amendment(&mut self) {
        self.begin_version(false);
    }

    /// Opens the next version. With `advance`, every sequence in use first advances by its query
    /// tokens, which a copy of the image does for itself.
    fn begin_version(&mut self, advance: bool) {
        self.version += 1;
        let mut change = if self.journal.len() == JOURNAL_VERSIONS {
            self.journal.pop_front().unwrap_or_default()
        } else {
            Change::default()
        };
        change.advance = advance;
        change.ranges.clear();
        self.journal.push_back(change);
        if advance {
            let order = self.layout.order;
            for index in order..order + self.words[header::NUM_SEQUENCES] as usize {
                let row = self.words[index] as usize;
                self.advanced_at[row] = self.version;
                advance_row(&mut self.words, self.layout.sequences, row);
            }
        }
    }

    /// Writes one word of the version that was begun last.
    pub(super) fn set(&mut self, index: usize, value: u32) {
        if self.words[index] != value {
            self.words[index] = value;
            self.note(index, index + 1);
        }
    }

    /// Writes consecutive words of the version that was begun last.
    pub(super) fn set_all(&mut self, begin: usize, values: &[u32]) {
        let target = &mut self.words[begin..begin + values.len()];
        let first = common_prefix(target, values, 0);
        if first == values.len() {
            return;
        }
        let equal_tail = target.iter().zip(values).rev().take_while(|(old, new)| old == new);
        let end = values.len() - equal_tail.count();
        target[first..end].copy_from_slice(&values[first..end]);
        self.note(begin + first, begin + end);
    }

    fn note(&mut self, begin: usize, end: usize) {
        self.written_at[begin / BLOCK_WORDS..=(end - 1) / BLOCK_WORDS].fill(self.version);
        let Some(change) = self.journal.back_mut() else { return };
        let (begin, end) = (begin as u32, end as u32);
        match change.ranges.last_mut() {
            Some(last) if last.1 == begin => last.1 = end,
            _ => change.ranges.push((begin, end)),
        }
    }

    /// Writes a row; only the words that differ count as changed.
    fn set_row<const N: usize>(&mut self, begin: usize, values: [u32; N]) {
        // Without a branch for each word: most rows are what they were.
        let held = &self.words[begin..begin + N];
        if held.iter().zip(&values).fold(0, |differ, (old, new)| differ | (old ^ new)) != 0 {
            for (offset, value) in values.into_iter().enumerate() {
                self.set(begin + offset, value);
            }
        }
    }

    pub(super) fn set_sequence(&mut self, row: u32, value: SequenceRow) {
        self.set_row(self.layout.sequences + row as usize * SequenceRow::WORDS, value.words());
    }

    pub(super) fn set_segment(&mut self, row: u32, value: SegmentRow) {
        self.set_row(self.layout.segments + row as usize * SegmentRow::WORDS, value.words());
    }

    /// Writes `order` from its start and the number of sequences.
    pub(super) fn set_order(&mut self, order: &[u32]) {
        self.set_all(self.layout.order, order);
        self.set(header::NUM_SEQUENCES, order.len() as u32);
    }

    /// Writes `segment_order` from `begin` on and the number of segments.
    pub(super) fn set_segment_order(&mut self, begin: usize, rows: &[u32]) {
        self.set_all(self.layout.segment_order + begin, rows);
        self.set(header::NUM_SEGMENTS, (begin + rows.len()) as u32);
    }

    pub(super) fn set_page_ids(&mut self, begin: usize, ids: &[u32]) {
        self.set_all(self.layout.page_ids + begin, ids);
    }

    pub(super) fn set_num_qo_rows(&mut self, rows: u32) {
        self.set(header::NUM_QO_ROWS, rows);
    }

    /// Writes the work items and what belongs to them; the caller has checked the capacities.
    pub(super) fn set_work(&mut self, work: &Work) {
        let layout = self.layout;
        for (index, item) in work.items.iter().enumerate() {
            self.set_all(layout.items + index * ItemRow::WORDS, item.words());
        }
        for (begin, words) in [
            (layout.merge_items, work.merge_items.as_flattened()),
            (layout.tokens, work.tokens.as_flattened()),
            (layout.merges, work.merges.as_flattened()),
            (layout.pad_rows, &work.pad_rows),
        ] {
            for (index, part) in words.chunks(WORK_STRIDE).enumerate() {
                self.set_all(begin + index * WORK_STRIDE, part);
            }
        }
        self.set(header::NUM_ITEMS, work.items.len() as u32);
        self.set(header::NUM_PAD_ROWS, work.pad_rows.len() as u32);
        self.set(header::NUM_MERGE_ITEMS, work.merge_items.len() as u32);
        self.set(header::NUM_TOKENS, work.tokens.len() as u32);
    }

    /// Writes one of the page ids that an item carries itself.
    pub(super) fn set_item_page(&mut self, item: u32, index: usize, page: u32) {
        let at = self.layout.items + item as usize * ItemRow::WORDS;
        self.set(at + ItemRow::HEAD_WORDS + index, page);
    }

    /// Work items in use.
    pub fn items(&self) -> &[ItemRow] {
        let num_items = self.words[header::NUM_ITEMS] as usize;
        let begin = self.layout.items;
        ItemRow::rows(&self.words[begin..begin + num_items * ItemRow::WORDS])
    }

    /// The change that made `version`, if the journal still has it.
    pub(super) fn change(&self, version: u64) -> Option<&Change> {
        let behind = usize::try_from(self.version.checked_sub(version)?).ok()?;
        self.journal.len().checked_sub(behind + 1).map(|index| &self.journal[index])
    }

    /// The blocks that were written to after `version`, as half-open word ranges.
    pub(super) fn written_since(&self, version: u64) -> impl Iterator<Item = (u32, u32)> + '_ {
        let blocks = self.written_at.iter().enumerate().filter(move |&(_, &at)| at > version);
        let end = self.words.len();
        blocks.map(move |(block, _)| {
            let begin = block * BLOCK_WORDS;
            (begin as u32, end.min(begin + BLOCK_WORDS) as u32)
        })
    }

    /// The `kv_len` words of all sequence rows that advanced after `version`.
    pub(super) fn advanced_since(&self, version: u64) -> impl Iterator<Item = u32> + '_ {
        let first = self.layout.sequences + KV_LEN;
        let rows = self.advanced_at.iter().enumerate().filter(move |&(_, &at)| at > version);
        rows.map(move |(row, _)| (first + row * SequenceRow::WORDS) as u32)
    }
}

/// Refuses pages of no tokens, and of more than a chunk may have.
pub(super) fn check_page_size(page_size: u32) -> Result<()> {
    if (1..=MAX_CHUNK_SIZE).contains(&page_size) {
        return Ok(());
    }
    Err(Error::invalid("page_size", page_size, format!("1 to {MAX_CHUNK_SIZE} tokens")))
}

/// Advances every sequence that `order` names in an image, `kv_len += qo_len`; false, and nothing
/// done, if the words are no image.
pub(super) fn advance_words(words: &mut [u32]) -> bool {
    let word = |index: usize| words.get(index).copied().unwrap_or(0);
    let limits = Limits {
        max_sequences: word(header::MAX_SEQUENCES),
        max_segments: word(header::MAX_SEGMENTS),
        max_page_ids: word(header::MAX_PAGE_IDS),
    };
    let work = WorkLimits {
        max_items: word(header::MAX_ITEMS),
        max_rows: word(header::MAX_ROWS),
        max_merges: word(header::MAX_MERGES),
    };
    let Ok(layout) = Layout::with_work(limits, work) else { return false };
    let num_sequences = word(header::NUM_SEQUENCES);
    let max_sequences = limits.max_sequences;
    if layout.num_words != words.len() || num_sequences > max_sequences {
        return false;
    }
    let order = layout.order..layout.order + num_sequences as usize;
    if words[order.clone()].iter().any(|&row| row >= max_sequences) {
        return false;
    }
    for index in order {
        let row = words[index] as usize;
        advance_row(words, layout.sequences, row);
    }
    true
}

fn advance_row(words: &mut [u32], sequences: usize, row: usize) {
    let at = sequences + row * SequenceRow::WORDS;
    words[at + KV_LEN] = words[at + KV_LEN].wrapping_add(words[at + QO_LEN]);
}
