//! From a plan to tasks: which keys go chunk-first, and how rows and keys are cut.
//!
//! The cut depends on the inputs alone, never on the number of threads, so that results do not.

use super::cost;
use super::kernel::MAX_TASK_ROWS;
use super::tables::{check_segments, end_position, invalid, padding_rows, token_rows, token_spans};
use crate::error::Result;
use crate::plan::{NONE, PlanView, SegmentRow};

/// Which segments go through phase one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// Those for which the cost model says that it pays.
    #[default]
    Auto,
    /// All that more than one sequence of the step covers.
    Always,
    /// None: each sequence reads all its keys.
    Never,
}

/// One query token, in depth-first order of the sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenRow {
    /// Row of q and of the output.
    pub(crate) q_row: u32,
    /// First key position that it sees.
    pub(crate) key_begin: u32,
    /// One past the last.
    pub(crate) key_end: u32,
}

/// A page and the token position of its first key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeyPage {
    pub(crate) id: u32,
    pub(crate) position: u32,
}

/// A block of query tokens against a run of pages, cut into splits: one partial state each.
#[derive(Debug, Clone)]
pub(crate) struct RowBlock {
    /// Tokens `tokens.0..tokens.1`.
    pub(crate) tokens: (usize, usize),
    /// Pages `pages.0..pages.1`, ascending in position.
    pages: (usize, usize),
    /// Splits of the pages.
    pub(crate) num_splits: usize,
    /// Slot of the first partial state; slots are by split, then by token.
    pub(crate) first_slot: usize,
    /// Whether its states are results: no other block shares its tokens, and it has one split.
    pub(crate) direct: bool,
}

impl RowBlock {
    /// The pages of a split.
    pub(crate) fn split(&self, split: usize) -> (usize, usize) {
        let pages = self.pages.1 - self.pages.0;
        let at = |i: usize| self.pages.0 + pages * i / self.num_splits;
        (at(split), at(split + 1))
    }

    /// The slot of the partial state of a token (an index into the tokens of the step).
    pub(crate) fn slot(&self, split: usize, token: usize) -> usize {
        self.first_slot + split * (self.tokens.1 - self.tokens.0) + token - self.tokens.0
    }
}

/// What a schedule depends on besides the plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) num_kv_heads: usize,
    /// Query heads of one K/V head.
    pub(crate) group: usize,
    pub(crate) head_dim: usize,
    /// Bytes of an element of K and V.
    pub(crate) itemsize: usize,
    /// Keys before its own that a query sees; `None` for all.
    pub(crate) window_left: Option<u32>,
    pub(crate) sharing: Sharing,
}

/// The tasks of one call.
#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) tokens: Vec<TokenRow>,
    pub(crate) pages: Vec<KeyPage>,
    /// Chunk-first blocks, then sequence-first blocks.
    pub(crate) blocks: Vec<RowBlock>,
    /// `(block, split)` of every task; each runs once for each K/V head.
    pub(crate) tasks: Vec<(usize, usize)>,
    /// For each token, its blocks in order of merging, as a range of `contributions`.
    merges: Vec<(usize, usize)>,
    contributions: Vec<usize>,
    /// Slots of partial states.
    pub(crate) num_slots: usize,
    /// Query rows that no sequence names.
    pub(crate) padding: Vec<u32>,
}

impl Schedule {
    /// The schedule of a step.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] when the plan's tables contradict themselves.
    pub(crate) fn new(view: &PlanView<'_>, geometry: &Geometry) -> Result<Self> {
        let spans = token_spans(view)?;
        check_segments(view)?;
        let tokens = token_rows(view, geometry.window_left);
        let padding = padding_rows(view, &tokens)?;
        let mut builder = Builder {
            view,
            geometry,
            spans,
            schedule: Self {
                tokens,
                pages: Vec::new(),
                blocks: Vec::new(),
                tasks: Vec::new(),
                merges: Vec::new(),
                contributions: Vec::new(),
                num_slots: 0,
                padding,
            },
        };
        builder.build()?;
        Ok(builder.schedule)
    }

    /// The blocks that a token's result is merged from, in order.
    pub(crate) fn blocks_of(&self, token: usize) -> impl Iterator<Item = &RowBlock> {
        let (begin, end) = self.merges[token];
        self.contributions[begin..end].iter().map(|&block| &self.blocks[block])
    }

    /// Whether a token's result is merged from partial states, or is empty.
    pub(crate) fn is_merged(&self, token: usize) -> bool {
        !self.blocks_of(token).any(|block| block.direct)
    }
}

/// Pages that some tokens see in common.
struct KeyRun {
    tokens: (usize, usize),
    pages: (usize, usize),
}

struct Builder<'a> {
    view: &'a PlanView<'a>,
    geometry: &'a Geometry,
    /// For each place in `order`, its first token; and the number of tokens.
    spans: Vec<usize>,
    schedule: Schedule,
}

impl Builder<'_> {
    fn build(&mut self) -> Result<()> {
        let run_of = self.chunk_first_runs();
        let num_runs = run_of.iter().flatten().max().map_or(0, |&last| last + 1);
        let mut segments = vec![Vec::new(); num_runs];
        for &segment in self.view.segment_order {
            if let Some(run) = run_of[segment as usize] {
                segments[run].push(segment);
            }
        }
        let mut runs = Vec::new();
        for segments in &segments {
            let first = &self.view.segments[segments[0] as usize];
            let tokens = (self.spans[first.seq_begin as usize], self.spans[first.seq_end as usize]);
            runs.extend(self.key_run(tokens, segments));
        }
        let mut path = Vec::new();
        for (place, &sequence) in self.view.order.iter().enumerate() {
            self.path(place, sequence, &mut path)?;
            path.retain(|&segment| run_of[segment as usize].is_none());
            let tokens = (self.spans[place], self.spans[place + 1]);
            runs.extend(self.key_run(tokens, &path));
        }
        self.cut(&runs);
        Ok(())
    }

    /// For each segment, its chunk-first run, if any; a segment and its parent that cover the same
    /// sequences share one.
    fn chunk_first_runs(&self) -> Vec<Option<usize>> {
        let segments = self.view.segments;
        let mut run_of = vec![None; segments.len()];
        if self.geometry.sharing == Sharing::Never {
            return run_of;
        }
        // Positions where the run of a segment, with all that share its cover, starts and ends.
        let mut extent = vec![(0, 0); segments.len()];
        for &row in self.view.segment_order {
            let start = match self.same_cover(row) {
                Some(parent) => extent[parent].0,
                None => segments[row as usize].start_pos,
            };
            extent[row as usize] = (start, end_position(self.view, row));
        }
        for &row in self.view.segment_order.iter().rev() {
            if let Some(parent) = self.same_cover(row) {
                extent[parent].1 = extent[parent].1.max(extent[row as usize].1);
            }
        }
        let mut num_runs = 0;
        for &row in self.view.segment_order {
            let index = row as usize;
            if !self.is_chunk_first(&segments[index], extent[index]) {
                continue;
            }
            run_of[index] = self.same_cover(row).and_then(|parent| run_of[parent]).or_else(|| {
                num_runs += 1;
                Some(num_runs - 1)
            });
        }
        run_of
    }

    /// A segment's parent, if it covers the same sequences.
    fn same_cover(&self, row: u32) -> Option<usize> {
        let segment = &self.view.segments[row as usize];
        let parent = self.view.segments.get(segment.parent as usize)?;
        (cover(parent) == cover(segment)).then_some(segment.parent as usize)
    }

    /// Whether a segment whose run has the given extent goes through phase one.
    fn is_chunk_first(&self, segment: &SegmentRow, (start, end): (u32, u64)) -> bool {
        let places = segment.seq_begin as usize..segment.seq_end as usize;
        if places.len() < 2 || self.geometry.sharing == Sharing::Always {
            return places.len() >= 2;
        }
        let is_leaf = |place: usize| {
            let leaf = self.view.sequences[self.view.order[place] as usize].leaf;
            self.view.segments.get(leaf as usize).is_some_and(|leaf| cover(leaf) == cover(segment))
        };
        let alone = start == 0 && places.clone().all(is_leaf);
        let tokens = places.map(|place| self.spans[place + 1] - self.spans[place]);
        cost::sharing_pays(self.geometry, tokens, end - u64::from(start), alone)
    }

    /// The segments of a sequence's path, root first.
    fn path(&self, place: usize, sequence: u32, path: &mut Vec<u32>) -> Result<()> {
        path.clear();
        let row = &self.view.sequences[sequence as usize];
        let mut segment = row.leaf;
        while segment != NONE {
            let at = &self.view.segments[segment as usize];
            if !(at.seq_begin as usize..at.seq_end as usize).contains(&place) {
                return Err(invalid(
                    format!("segment {segment} without sequence {sequence}"),
                    "segments that cover every sequence below them",
                ));
            }
            path.push(segment);
            segment = at.parent;
        }
        let keys = path.first().map_or(0, |&leaf| end_position(self.view, leaf));
        if u64::from(row.kv_len) > keys {
            return Err(invalid(
                format!("kv_len {} of sequence {sequence}", row.kv_len),
                format!("at most the {keys} keys of its path"),
            ));
        }
        path.reverse();
        Ok(())
    }

    /// The pages of segments that some of the tokens see; `None` if there are no such pages.
    fn key_run(&mut self, tokens: (usize, usize), segments: &[u32]) -> Option<KeyRun> {
        let (first, last) = visible(&self.schedule.tokens[tokens.0..tokens.1]);
        let begin = self.schedule.pages.len();
        let page_size = self.view.page_size;
        for &segment in segments {
            let at = &self.view.segments[segment as usize];
            let skipped = first.saturating_sub(at.start_pos) / page_size;
            let end = last.saturating_sub(at.start_pos).div_ceil(page_size).min(at.num_pages);
            for page in skipped..end {
                self.schedule.pages.push(KeyPage {
                    id: self.view.page_ids[(at.ids_begin + page) as usize],
                    position: at.start_pos + page * page_size,
                });
            }
        }
        let end = self.schedule.pages.len();
        (begin < end).then_some(KeyRun { tokens, pages: (begin, end) })
    }

    /// Cuts runs into blocks of rows and splits of keys, and says what is merged with what.
    fn cut(&mut self, runs: &[KeyRun]) {
        let schedule = &mut self.schedule;
        let mut shares = vec![0u32; schedule.tokens.len()];
        for run in runs {
            for share in &mut shares[run.tokens.0..run.tokens.1] {
                *share += 1;
            }
        }
        let block_tokens = (MAX_TASK_ROWS / self.geometry.group).max(1);
        for run in runs {
            let mut begin = run.tokens.0;
            while begin < run.tokens.1 {
                let end = (begin + block_tokens).min(run.tokens.1);
                let pages = self.view.page_size;
                let (first, last) = visible(&schedule.tokens[begin..end]);
                let run_pages = &schedule.pages[run.pages.0..run.pages.1];
                let skipped = run_pages.partition_point(|page| page.position + pages <= first);
                let kept = run_pages.partition_point(|page| page.position < last);
                if skipped < kept {
                    schedule.blocks.push(RowBlock {
                        tokens: (begin, end),
                        pages: (run.pages.0 + skipped, run.pages.0 + kept),
                        num_splits: 1,
                        first_slot: 0,
                        direct: false,
                    });
                }
                begin = end;
            }
        }
        let work = |block: &RowBlock| {
            let keys = (block.pages.1 - block.pages.0) * self.view.page_size as usize;
            cost::work(self.geometry, block.tokens.1 - block.tokens.0, keys)
        };
        let total: u64 = schedule.blocks.iter().map(work).sum();
        for (index, block) in schedule.blocks.iter_mut().enumerate() {
            let keys = (block.pages.1 - block.pages.0) * self.view.page_size as usize;
            let splits = cost::num_splits(self.geometry, work(block), total, keys);
            block.num_splits = splits.min(block.pages.1 - block.pages.0);
            let tokens = block.tokens.0..block.tokens.1;
            block.direct = block.num_splits == 1 && shares[tokens.clone()].iter().all(|&n| n == 1);
            if !block.direct {
                block.first_slot = schedule.num_slots;
                schedule.num_slots += tokens.len() * block.num_splits;
            }
            schedule.tasks.extend((0..block.num_splits).map(|split| (index, split)));
        }
        contributions(schedule);
    }
}

/// The sequences that a segment covers.
fn cover(segment: &SegmentRow) -> (u32, u32) {
    (segment.seq_begin, segment.seq_end)
}

/// Lists the blocks of each token.
fn contributions(schedule: &mut Schedule) {
    let mut counts = vec![0usize; schedule.tokens.len()];
    for block in &schedule.blocks {
        for count in &mut counts[block.tokens.0..block.tokens.1] {
            *count += 1;
        }
    }
    let mut next = 0;
    schedule.merges = counts
        .iter()
        .map(|count| {
            let begin = next;
            next += count;
            (begin, begin)
        })
        .collect();
    schedule.contributions = vec![0; next];
    for (index, block) in schedule.blocks.iter().enumerate() {
        for (_, end) in &mut schedule.merges[block.tokens.0..block.tokens.1] {
            schedule.contributions[*end] = index;
            *end += 1;
        }
    }
}

/// The positions that some of the tokens see.
fn visible(tokens: &[TokenRow]) -> (u32, u32) {
    let begin = tokens.iter().map(|token| token.key_begin).min().unwrap_or(0);
    let end = tokens.iter().map(|token| token.key_end).max().unwrap_or(0);
    (begin, end)
}
