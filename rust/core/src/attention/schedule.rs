//! From a plan to tasks: which keys go chunk-first, and how rows and keys are cut.
//!
//! The cut depends on the inputs alone, never on the number of threads, so that results do not.

use super::cost;
use super::kernel::MAX_TASK_ROWS;
use crate::error::{Error, Result};
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
        let mut run_of = vec![None; self.view.segments.len()];
        let mut num_runs = 0;
        // Keys of the run of segments above a segment with its cover, itself included.
        let mut run_keys = vec![0u64; self.view.segments.len()];
        let same_cover = |segment: &SegmentRow| {
            let parent = self.view.segments.get(segment.parent as usize)?;
            let same = (parent.seq_begin, parent.seq_end) == (segment.seq_begin, segment.seq_end);
            same.then_some(segment.parent as usize)
        };
        for &row in self.view.segment_order {
            let segment = &self.view.segments[row as usize];
            let keys = u64::from(segment.num_pages) * u64::from(self.view.page_size);
            run_keys[row as usize] = keys;
            if let Some(parent) = same_cover(segment) {
                run_keys[row as usize] += run_keys[parent];
            }
        }
        for &row in self.view.segment_order.iter().rev() {
            let segment = &self.view.segments[row as usize];
            if let Some(parent) = same_cover(segment) {
                run_keys[parent] = run_keys[parent].max(run_keys[row as usize]);
            }
        }
        for &row in self.view.segment_order {
            let segment = &self.view.segments[row as usize];
            let tokens =
                self.spans[segment.seq_end as usize] - self.spans[segment.seq_begin as usize];
            let covered = (segment.seq_end - segment.seq_begin) as usize;
            let shared = covered > 1
                && match self.geometry.sharing {
                    Sharing::Never => false,
                    Sharing::Always => true,
                    Sharing::Auto => {
                        cost::sharing_pays(self.geometry, covered, tokens, run_keys[row as usize])
                    }
                };
            if !shared {
                continue;
            }
            run_of[row as usize] = same_cover(segment).and_then(|p| run_of[p]).or_else(|| {
                num_runs += 1;
                Some(num_runs - 1)
            });
        }
        run_of
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

fn token_rows(view: &PlanView<'_>, window_left: Option<u32>) -> Vec<TokenRow> {
    let mut tokens = Vec::new();
    for &sequence in view.order {
        let row = &view.sequences[sequence as usize];
        for t in 0..row.qo_len {
            // A query before position 0 sees nothing.
            let key_end = (row.kv_len + t + 1).saturating_sub(row.qo_len);
            let key_begin = match window_left {
                Some(window) => key_end.saturating_sub(window.saturating_add(1)),
                None => 0,
            };
            tokens.push(TokenRow { q_row: row.qo_begin + t, key_begin, key_end });
        }
    }
    tokens
}

fn token_spans(view: &PlanView<'_>) -> Result<Vec<usize>> {
    let mut spans = vec![0];
    for &sequence in view.order {
        let row = view.sequences.get(sequence as usize).ok_or_else(|| {
            invalid(format!("sequence row {sequence}"), format!("below {}", view.sequences.len()))
        })?;
        if u64::from(row.qo_begin) + u64::from(row.qo_len) > u64::from(view.num_qo_rows) {
            return Err(invalid(
                format!("query rows {} + {}", row.qo_begin, row.qo_len),
                format!("at most {}", view.num_qo_rows),
            ));
        }
        if row.kv_len > i32::MAX as u32 {
            return Err(invalid(format!("kv_len {}", row.kv_len), "below 2^31"));
        }
        if row.leaf != NONE && row.leaf as usize >= view.segments.len() {
            return Err(invalid(
                format!("leaf {}", row.leaf),
                format!("below {}", view.segments.len()),
            ));
        }
        spans.push(spans[spans.len() - 1] + row.qo_len as usize);
    }
    Ok(spans)
}

fn check_segments(view: &PlanView<'_>) -> Result<()> {
    if view.page_size == 0 {
        return Err(invalid("page_size 0", "1 or more"));
    }
    let mut seen = vec![false; view.segments.len()];
    for &row in view.segment_order {
        let Some(segment) = view.segments.get(row as usize) else {
            return Err(invalid(
                format!("segment row {row}"),
                format!("below {}", view.segments.len()),
            ));
        };
        let ids_end = u64::from(segment.ids_begin) + u64::from(segment.num_pages);
        if ids_end > view.page_ids.len() as u64 {
            return Err(invalid(
                format!("page ids up to {ids_end} of segment {row}"),
                format!("at most {}", view.page_ids.len()),
            ));
        }
        if segment.seq_begin > segment.seq_end || segment.seq_end as usize > view.order.len() {
            return Err(invalid(
                format!("sequences {}..{} of segment {row}", segment.seq_begin, segment.seq_end),
                format!("a range of 0..{}", view.order.len()),
            ));
        }
        let start = match segment.parent {
            NONE => 0,
            parent if seen.get(parent as usize) == Some(&true) => end_position(view, parent),
            parent => {
                return Err(invalid(
                    format!("parent {parent} of segment {row}"),
                    "a segment before it in segment_order",
                ));
            }
        };
        if u64::from(segment.start_pos) != start || end_position(view, row) > i32::MAX as u64 {
            return Err(invalid(
                format!("start_pos {} of segment {row}", segment.start_pos),
                format!("{start}, where its parent ends, and an end below 2^31"),
            ));
        }
        seen[row as usize] = true;
    }
    for &sequence in view.order {
        let leaf = view.sequences[sequence as usize].leaf;
        if leaf != NONE && !seen[leaf as usize] {
            return Err(invalid(format!("leaf {leaf}"), "a segment of segment_order"));
        }
    }
    Ok(())
}

/// One past the position of a segment's last key.
fn end_position(view: &PlanView<'_>, segment: u32) -> u64 {
    let row = &view.segments[segment as usize];
    u64::from(row.start_pos) + u64::from(row.num_pages) * u64::from(view.page_size)
}

/// Query rows that no sequence names.
fn padding_rows(view: &PlanView<'_>, tokens: &[TokenRow]) -> Result<Vec<u32>> {
    let mut named = vec![false; view.num_qo_rows as usize];
    for token in tokens {
        if std::mem::replace(&mut named[token.q_row as usize], true) {
            return Err(invalid(format!("query row {} twice", token.q_row), "each row once"));
        }
    }
    Ok((0..view.num_qo_rows).filter(|&row| !named[row as usize]).collect())
}

fn invalid(given: impl ToString, allowed: impl Into<String>) -> Error {
    Error::invalid("plan", given, allowed)
}
