//! Where each table lies in the image of words.

use super::items::{ItemRow, MergeItem, MergeRow, TokenRow};
use super::view::{Row, SegmentRow, SequenceRow};
use crate::error::{Error, Result};

/// Words of the header.
pub(super) const HEADER_WORDS: usize = 32;

/// Sections start at a multiple of so many words (128 bytes).
const ALIGNMENT: usize = 32;

/// The header's words, by index. Words that are not named here are 0.
pub(super) mod header {
    pub const FORMAT: usize = 0;
    pub const PAGE_SIZE: usize = 1;
    pub const NUM_QO_ROWS: usize = 2;
    pub const NUM_SEQUENCES: usize = 3;
    pub const NUM_SEGMENTS: usize = 4;
    pub const ORDER: usize = 5;
    pub const SEQUENCES: usize = 6;
    pub const SEGMENT_ORDER: usize = 7;
    pub const SEGMENTS: usize = 8;
    pub const PAGE_IDS: usize = 9;
    pub const MAX_SEQUENCES: usize = 10;
    pub const MAX_SEGMENTS: usize = 11;
    pub const MAX_PAGE_IDS: usize = 12;
    pub const NUM_ITEMS: usize = 13;
    pub const NUM_PAD_ROWS: usize = 14;
    pub const NUM_MERGE_ITEMS: usize = 15;
    pub const ITEMS: usize = 16;
    pub const TOKENS: usize = 17;
    pub const MERGES: usize = 18;
    pub const PAD_ROWS: usize = 19;
    pub const MAX_ITEMS: usize = 20;
    pub const MAX_ROWS: usize = 21;
    pub const MAX_MERGES: usize = 22;
    pub const NUM_TOKENS: usize = 23;
    pub const MERGE_ITEMS: usize = 24;
}

/// How many rows each table can hold, fixed when it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sequences of one step.
    pub max_sequences: u32,
    /// Segment rows of one step.
    pub max_segments: u32,
    /// Chunk ids that the tables hold, the unused ends of blocks included.
    pub max_page_ids: u32,
}

/// How many work items and what belongs to them the tables can hold; all 0 for tables without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WorkLimits {
    /// Work items, at least one for each block of the device.
    pub max_items: u32,
    /// Rows of `q`, padding included.
    pub max_rows: u32,
    /// Partial states of one query head, over all tokens.
    pub max_merges: u32,
}

impl WorkLimits {
    /// These capacities, and powers of two where `needed` has more.
    pub fn enlarged(self, needed: Self) -> Self {
        let larger = |needed: u32, held: u32| match needed > held {
            true => needed.checked_next_power_of_two().unwrap_or(needed),
            false => held,
        };
        Self {
            max_items: larger(needed.max_items, self.max_items),
            max_rows: larger(needed.max_rows, self.max_rows),
            max_merges: larger(needed.max_merges, self.max_merges),
        }
    }
}

/// The word offsets of the sections, in the order in which they lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// The capacities that the sections were laid out for.
    pub limits: Limits,
    /// The capacities of the work items' sections.
    pub work: WorkLimits,
    /// First word of `order`: `max_sequences` words.
    pub order: usize,
    /// First word of `sequences`: `max_sequences` rows of 5 words.
    pub sequences: usize,
    /// First word of `segment_order`: `max_segments` words.
    pub segment_order: usize,
    /// First word of `segments`: `max_segments` rows of 6 words.
    pub segments: usize,
    /// First word of `page_ids`: `max_page_ids` words.
    pub page_ids: usize,
    /// First word of `items`: `max_items` rows of 32 words.
    pub items: usize,
    /// First word of `merge_items`: `max_rows + max_items` rows of 4 words.
    pub merge_items: usize,
    /// First word of `tokens`: `max_rows` rows of 4 words.
    pub tokens: usize,
    /// First word of `merges`: `max_merges` rows of 2 words.
    pub merges: usize,
    /// First word of `pad_rows`: `max_rows` words.
    pub pad_rows: usize,
    /// Words of the whole image.
    pub num_words: usize,
}

impl Layout {
    /// Lays out the sections, without work items.
    ///
    /// # Errors
    /// As [`Layout::with_work`].
    pub fn new(limits: Limits) -> Result<Self> {
        Self::with_work(limits, WorkLimits::default())
    }

    /// Lays out the sections.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if a capacity of `limits` is 0 or the image would pass 2^32 words.
    pub fn with_work(limits: Limits, work: WorkLimits) -> Result<Self> {
        let Limits { max_sequences, max_segments, max_page_ids } = limits;
        let named = [
            ("max_sequences", max_sequences),
            ("max_segments", max_segments),
            ("max_page_ids", max_page_ids),
        ];
        if let Some((name, given)) = named.into_iter().find(|&(_, value)| value == 0) {
            return Err(Error::invalid(name, given, "at least 1"));
        }
        let mut end = HEADER_WORDS;
        let mut section = |rows: u32, words: usize| {
            let begin = end.next_multiple_of(ALIGNMENT);
            end = begin + rows as usize * words;
            begin
        };
        let layout = Self {
            limits,
            work,
            order: section(max_sequences, 1),
            sequences: section(max_sequences, SequenceRow::WORDS),
            segment_order: section(max_segments, 1),
            segments: section(max_segments, SegmentRow::WORDS),
            page_ids: section(max_page_ids, 1),
            items: section(work.max_items, ItemRow::WORDS),
            // A run of tokens each, and one more for each block.
            merge_items: section(work.max_rows.saturating_add(work.max_items), MergeItem::WORDS),
            tokens: section(work.max_rows, TokenRow::WORDS),
            merges: section(work.max_merges, MergeRow::WORDS),
            pad_rows: section(work.max_rows, 1),
            num_words: end,
        };
        if u32::try_from(layout.num_words).is_err() {
            let allowed = format!("tables of fewer than 2^32 words, not {}", layout.num_words);
            return Err(Error::invalid("limits", format!("{limits:?}"), allowed));
        }
        Ok(layout)
    }
}
