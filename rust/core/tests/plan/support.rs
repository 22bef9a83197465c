//! A numbered self-check of the tables, shared by the plan's tests.

use std::collections::HashSet;

use chunkcache::error::Error;
use chunkcache::plan::{
    Diff, Image, Limits, NO_SLOT, NONE, Plan, PlanView, Planner, SegmentRow, apply_patch,
};
use chunkcache::tree::{PrefixTree, SeqHandle, TreeConfig};

/// What the tables must say of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    pub qo_begin: u32,
    pub qo_len: u32,
    pub kv_len: u32,
    pub num_cached_rows: u32,
    /// The pages of its first `kv_len` tokens.
    pub pages: Vec<u32>,
}

/// Checks every table against what the step's sequences must find in it.
pub fn check_tables(view: &PlanView<'_>, expected: &[Expected]) -> Result<(), String> {
    check_order(view, expected)?;
    check_segments(view)?;
    for wanted in expected {
        check_path(view, wanted)?;
    }
    check_coverage(view)
}

fn require(number: u32, holds: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(format!("({number}) {}", message())) }
}

fn check_order(view: &PlanView<'_>, expected: &[Expected]) -> Result<(), String> {
    let distinct: HashSet<_> = view.order.iter().collect();
    require(1, distinct.len() == view.order.len(), || format!("order repeats: {:?}", view.order))?;
    require(2, view.order.iter().all(|&row| (row as usize) < view.sequences.len()), || {
        format!("order leaves the table: {:?}", view.order)
    })?;
    require(3, view.order.len() == expected.len(), || {
        format!("{} sequences, expected {}", view.order.len(), expected.len())
    })
}

fn check_segments(view: &PlanView<'_>) -> Result<(), String> {
    let mut seen = HashSet::new();
    for &row in view.segment_order {
        let segment = view.segments[row as usize];
        require(4, seen.insert(row), || format!("segment {row} twice in its order"))?;
        require(5, segment.parent == NONE || seen.contains(&segment.parent), || {
            format!("segment {row} before its parent {}", segment.parent)
        })?;
        let range = segment.seq_begin..segment.seq_end;
        require(6, !range.is_empty() && range.end as usize <= view.order.len(), || {
            format!("segment {row} covers {range:?} of {}", view.order.len())
        })?;
        let ids_end = segment.ids_begin as usize + segment.num_pages as usize;
        require(7, segment.num_pages > 0 && ids_end <= view.page_ids.len(), || {
            format!("segment {row} has {} ids up to {ids_end}", segment.num_pages)
        })?;
        if segment.parent == NONE {
            require(8, segment.start_pos == 0, || {
                format!("segment {row} starts at {} without a parent", segment.start_pos)
            })?;
        } else {
            let parent = view.segments[segment.parent as usize];
            let end = parent.start_pos + parent.num_pages * view.page_size;
            require(9, segment.start_pos == end, || {
                format!("segment {row} starts at {}, its parent ends at {end}", segment.start_pos)
            })?;
            require(10, parent.seq_begin <= range.start && range.end <= parent.seq_end, || {
                format!("segment {row} covers {range:?} outside its parent {parent:?}")
            })?;
        }
    }
    Ok(())
}

/// The segments of a sequence row, first one first.
pub fn path(view: &PlanView<'_>, row: u32) -> Vec<SegmentRow> {
    let mut path = Vec::new();
    let mut segment = view.sequences[row as usize].leaf;
    while segment != NONE {
        path.push(view.segments[segment as usize]);
        segment = view.segments[segment as usize].parent;
    }
    path.reverse();
    path
}

fn check_path(view: &PlanView<'_>, wanted: &Expected) -> Result<(), String> {
    let found = view.order.iter().copied().find(|&row| {
        let row = view.sequences[row as usize];
        (row.qo_begin, row.qo_len) == (wanted.qo_begin, wanted.qo_len)
    });
    require(11, found.is_some(), || format!("no sequence has {wanted:?}"))?;
    let row = found.unwrap_or_default();
    let sequence = view.sequences[row as usize];
    let lengths = (sequence.kv_len, sequence.num_cached_rows);
    require(12, lengths == (wanted.kv_len, wanted.num_cached_rows), || {
        format!("row {row} has {sequence:?}, expected {wanted:?}")
    })?;
    let mut pages = Vec::new();
    for segment in path(view, row) {
        let begin = segment.ids_begin as usize;
        pages.extend_from_slice(&view.page_ids[begin..begin + segment.num_pages as usize]);
    }
    let needed = sequence.kv_len.div_ceil(view.page_size) as usize;
    require(13, pages.len() >= needed && pages[..needed] == wanted.pages[..needed], || {
        format!("row {row} reads {pages:?}, expected {:?}", wanted.pages)
    })
}

/// Every segment covers exactly the sequences whose path holds it.
fn check_coverage(view: &PlanView<'_>) -> Result<(), String> {
    for &row in view.segment_order {
        let segment = view.segments[row as usize];
        for (place, &sequence) in view.order.iter().enumerate() {
            let covered = (segment.seq_begin..segment.seq_end).contains(&(place as u32));
            let on_path = path(view, sequence).contains(&segment);
            require(14, covered == on_path, || {
                format!("segment {row} {segment:?} and place {place}: on its path: {on_path}")
            })?;
        }
    }
    Ok(())
}

/// A copy of an image that is kept up to date by patches alone, as the device's is.
#[derive(Debug, Clone, Default)]
pub struct Copy {
    pub words: Vec<u32>,
    pub version: u64,
}

impl Copy {
    /// Brings the copy up to date; returns the words that were overwritten.
    pub fn sync(&mut self, image: &Image) -> usize {
        let diff = image.diff_since(self.version);
        let mut staging = vec![0; diff.patch_words()];
        let len = image.write_patch(&diff, &mut staging).expect("the diff is current");
        assert_eq!(len, staging.len());
        self.words.resize(image.words().len(), 0);
        apply_patch(&mut self.words, &staging).expect("the patch is whole");
        self.version = diff.to;
        diff.num_words()
    }
}

/// `len` tokens that no other `first` gives, as long as the ranges do not meet.
pub fn tokens(first: u32, len: u32) -> Vec<u32> {
    (first * 100_000..first * 100_000 + len).collect()
}

/// A tree and its planner; every plan's tables are checked.
pub struct Steps {
    pub tree: PrefixTree,
    pub planner: Planner,
    live: Vec<SeqHandle>,
}

impl Steps {
    pub fn new(capacity: usize, chunk_size: usize, limits: Option<Limits>) -> Self {
        let tree = PrefixTree::new(TreeConfig::new(capacity, chunk_size)).expect("a valid tree");
        let page_size = chunk_size as u32;
        let limits = limits.unwrap_or_else(|| Planner::default_limits(page_size, capacity as u32));
        let planner = Planner::new(page_size, limits).expect("valid limits");
        Self { tree, planner, live: Vec::new() }
    }

    pub fn live(&self) -> Vec<SeqHandle> {
        self.live.clone()
    }

    pub fn insert(&mut self, tokens: &[u32]) -> SeqHandle {
        let seq = self.tree.insert(tokens, b"").expect("room for the prompt").seq;
        self.live.push(seq);
        seq
    }

    /// Inserts a prompt if there is room for it.
    pub fn try_insert(&mut self, tokens: &[u32]) {
        self.live.extend(self.tree.insert(tokens, b"").map(|inserted| inserted.seq));
    }

    /// Forks a sequence if there is room for it.
    pub fn fork(&mut self, seq: SeqHandle) {
        self.live.extend(self.tree.fork(seq).map(|forked| forked.seq));
    }

    pub fn remove(&mut self, seq: SeqHandle) {
        self.tree.remove(seq).expect("a live sequence");
        self.live.retain(|&other| other != seq);
    }

    /// Plans a step and checks its tables against the tree.
    pub fn plan(
        &mut self,
        batch: &[Option<SeqHandle>],
        qo_indptr: Option<&[u32]>,
    ) -> Result<Plan, Error> {
        let plan = self.planner.plan(&mut self.tree, batch, qo_indptr)?;
        let view = plan.view(self.planner.image()).expect("the plan is new");
        let mut expected = Vec::new();
        for (seq, span) in batch.iter().zip(plan.qo_indptr().windows(2)) {
            let Some(seq) = *seq else { continue };
            let slots = &plan.slot_mapping()[span[0] as usize..span[1] as usize];
            let cached = slots.iter().take_while(|&&slot| slot == NO_SLOT).count();
            let kv_len = plan.positions()[span[1] as usize - 1] + 1;
            assert!(slots[cached..].iter().all(|&slot| slot != NO_SLOT), "{slots:?}");
            expected.push(Expected {
                qo_begin: span[0],
                qo_len: span[1] - span[0],
                kv_len: kv_len as u32,
                num_cached_rows: cached as u32,
                pages: self.tree.chunk_ids(seq).expect("a live sequence"),
            });
        }
        check_tables(&view, &expected).unwrap_or_else(|error| panic!("{error}\n{view:?}"));
        Ok(plan)
    }

    /// Plans a step and commits it.
    pub fn run(
        &mut self,
        batch: &[Option<SeqHandle>],
        qo_indptr: Option<&[u32]>,
    ) -> Result<Plan, Error> {
        let mut plan = self.plan(batch, qo_indptr)?;
        let step = plan.close().expect("the plan is open");
        self.tree.commit_step(step).expect("the step is open");
        Ok(plan)
    }
}

/// Runs a step over all that the sequences have left to compute and returns what changed.
pub fn compute(steps: &mut Steps, seqs: &[SeqHandle]) -> Diff {
    let before = steps.planner.image().version();
    let mut indptr = vec![0];
    for &seq in seqs {
        let info = steps.tree.sequence(seq).unwrap();
        let left = info.num_tokens - info.num_scheduled_tokens;
        indptr.push(indptr[indptr.len() - 1] + left as u32);
    }
    let batch: Vec<_> = seqs.iter().copied().map(Some).collect();
    steps.run(&batch, Some(&indptr)).unwrap();
    steps.planner.image().diff_since(before)
}
