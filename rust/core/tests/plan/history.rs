//! Random histories of a tree: every step's tables are right, and copies that are kept up to date by
//! patches alone stay equal to them.

use crate::items::{check_items, planner, work_limits};
use crate::support::{Copy, Steps};
use chunkcache::plan::{Limits, Planner, WorkLimits};
use chunkcache::tree::SeqHandle;
use proptest::prelude::*;

const CHUNK: u32 = 64;

/// One operation; numbers choose among what there is at that moment.
#[derive(Debug, Clone)]
enum Op {
    /// Prompts are prefixes of a few long texts, some with a tail of their own.
    Insert {
        text: u32,
        len: usize,
        tail: Option<u32>,
    },
    Append {
        seq: usize,
        len: u32,
    },
    AppendAll,
    Reserve {
        seq: usize,
    },
    CancelReserved {
        seq: usize,
    },
    Fork {
        seq: usize,
    },
    Truncate {
        seq: usize,
        len: usize,
    },
    Remove {
        seq: usize,
    },
    Evict {
        chunks: usize,
    },
    /// All sequences with tokens left compute up to `most` of them.
    Step {
        most: u32,
        padding: bool,
        abort: bool,
    },
    /// As `Step`, for a part of the sequences in another order.
    PartStep {
        most: u32,
        skip: usize,
        rotate: usize,
    },
    Sync {
        copy: usize,
    },
    /// Further plans come from the other of two planners, which has missed what happened.
    OtherPlanner,
}

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![1..200_usize, (1..8_usize).prop_map(|n| n * 64), 3900..4500_usize, Just(8200)]
}

fn ops() -> impl Strategy<Value = Op> {
    let seq = 0..16_usize;
    prop_oneof![
        3 => (0..3_u32, lengths(), prop::option::of(0..4_u32))
            .prop_map(|(text, len, tail)| Op::Insert { text, len, tail }),
        2 => (seq.clone(), 1..150_u32).prop_map(|(seq, len)| Op::Append { seq, len }),
        3 => Just(Op::AppendAll),
        1 => seq.clone().prop_map(|seq| Op::Reserve { seq }),
        1 => seq.clone().prop_map(|seq| Op::CancelReserved { seq }),
        1 => seq.clone().prop_map(|seq| Op::Fork { seq }),
        1 => (seq.clone(), lengths()).prop_map(|(seq, len)| Op::Truncate { seq, len }),
        1 => seq.prop_map(|seq| Op::Remove { seq }),
        1 => (1..80_usize).prop_map(|chunks| Op::Evict { chunks }),
        6 => (prop_oneof![Just(1_u32), Just(9000), 2..300_u32], any::<bool>(), prop::bool::weighted(0.1))
            .prop_map(|(most, padding, abort)| Op::Step { most, padding, abort }),
        2 => (1..200_u32, 1..4_usize, 0..5_usize)
            .prop_map(|(most, skip, rotate)| Op::PartStep { most, skip, rotate }),
        3 => (0..3_usize).prop_map(|copy| Op::Sync { copy }),
        1 => Just(Op::OtherPlanner),
    ]
}

struct History {
    steps: Steps,
    copies: [Copy; 3],
    other: (Planner, [Copy; 3]),
}

impl History {
    /// A history whose tables have work items, in sections of these sizes.
    fn with_items(limits: Option<Limits>, work: WorkLimits) -> Self {
        let mut history = Self::new(limits);
        history.steps.planner = planner(400, limits, work);
        history.other.0 = planner(400, limits, work);
        history
    }

    fn new(limits: Option<Limits>) -> Self {
        let limits = limits.unwrap_or_else(|| Planner::default_limits(CHUNK, 400));
        Self {
            steps: Steps::new(400, CHUNK as usize, Some(limits)),
            copies: Default::default(),
            other: (Planner::new(CHUNK, limits).unwrap(), Default::default()),
        }
    }

    fn pick(&self, index: usize) -> Option<SeqHandle> {
        let live = self.steps.live();
        (!live.is_empty()).then(|| live[index % live.len()])
    }

    fn apply(&mut self, op: &Op) {
        // Operations that the tree refuses, for want of chunks or tokens, are part of a history.
        match *op {
            Op::Insert { text, len, tail } => {
                let end = tail.map_or(0..0, |tail| tail * 1000..tail * 1000 + 30);
                let first = text * 100_000;
                let tokens: Vec<u32> = (first..first + len as u32).chain(end).collect();
                self.steps.try_insert(&tokens);
            }
            Op::Append { seq, len } => {
                let Some(seq) = self.pick(seq) else { return };
                let _ = self.steps.tree.append(seq, &vec![5; len as usize]);
            }
            Op::AppendAll => {
                let live = self.steps.live();
                let _ = self.steps.tree.append_batch(&live, &vec![7; live.len()]);
            }
            Op::Reserve { seq } => {
                let _ = self.pick(seq).map(|seq| self.steps.tree.reserve(&[seq]));
            }
            Op::CancelReserved { seq } => {
                let _ = self.pick(seq).map(|seq| self.steps.tree.cancel_reserved(seq));
            }
            Op::Fork { seq } => {
                let _ = self.pick(seq).map(|seq| self.steps.fork(seq));
            }
            Op::Truncate { seq, len } => {
                let _ = self.pick(seq).map(|seq| self.steps.tree.truncate(seq, len));
            }
            Op::Remove { seq } => {
                let _ = self.pick(seq).map(|seq| self.steps.remove(seq));
            }
            Op::Evict { chunks } => {
                self.steps.tree.evict(chunks);
            }
            Op::Step { most, padding, abort } => {
                let mut batch = self.ready(most);
                if padding {
                    batch.insert(batch.len() / 2, (None, 2));
                }
                self.step(&batch, abort);
            }
            Op::PartStep { most, skip, rotate } => {
                let mut batch: Vec<_> = self.ready(most).into_iter().step_by(skip).collect();
                let len = batch.len().max(1);
                batch.rotate_left(rotate % len);
                self.step(&batch, false);
            }
            Op::Sync { copy } => {
                self.copies[copy].sync(self.steps.planner.image());
                assert_eq!(self.copies[copy].words, self.steps.planner.image().words());
            }
            Op::OtherPlanner => {
                std::mem::swap(&mut self.steps.planner, &mut self.other.0);
                std::mem::swap(&mut self.copies, &mut self.other.1);
            }
        }
        self.steps.tree.check_invariants().unwrap();
    }

    /// The sequences with tokens left to compute, and how many.
    fn ready(&self, most: u32) -> Vec<(Option<SeqHandle>, u32)> {
        let left = |seq| {
            let info = self.steps.tree.sequence(seq).unwrap();
            let left = (info.num_tokens - info.num_scheduled_tokens) as u32;
            (left > 0 && !info.is_waiting).then_some((Some(seq), left.min(most)))
        };
        self.steps.live().into_iter().filter_map(left).collect()
    }

    fn step(&mut self, batch: &[(Option<SeqHandle>, u32)], abort: bool) {
        let (seqs, lens): (Vec<_>, Vec<_>) = batch.iter().copied().unzip();
        let mut indptr = vec![0];
        indptr.extend(lens.iter().scan(0, |sum, len| {
            *sum += len;
            Some(*sum)
        }));
        let words = self.steps.planner.image().words().to_vec();
        match self.steps.plan(&seqs, Some(&indptr)) {
            Ok(mut plan) => {
                check_items(&self.steps.planner);
                let step = plan.close().unwrap();
                if abort {
                    self.steps.tree.abort_step(step).unwrap();
                } else {
                    self.steps.tree.commit_step(step).unwrap();
                }
                self.copies[0].sync(self.steps.planner.image());
                assert_eq!(self.copies[0].words, self.steps.planner.image().words());
            }
            Err(_) => assert_eq!(self.steps.planner.image().words(), words),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn tables_and_copies_stay_right(ops in prop::collection::vec(ops(), 1..60)) {
        let mut history = History::new(None);
        for op in &ops {
            history.apply(op);
        }
    }

    #[test]
    fn tight_tables_stay_right(ops in prop::collection::vec(ops(), 1..60)) {
        let limits = Limits { max_sequences: 5, max_segments: 9, max_page_ids: 64 * 7 };
        let mut history = History::new(Some(limits));
        for op in &ops {
            history.apply(op);
        }
    }
}

proptest! {
    // Each step is checked token by token and head by head.
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn work_items_stay_right(ops in prop::collection::vec(ops(), 1..60)) {
        let mut history = History::with_items(None, work_limits());
        for op in &ops {
            history.apply(op);
        }
    }

    #[test]
    fn tight_work_items_stay_right(ops in prop::collection::vec(ops(), 1..60)) {
        let work = WorkLimits { max_items: 40, max_rows: 300, max_merges: 400 };
        let mut history = History::with_items(None, work);
        for op in &ops {
            history.apply(op);
        }
    }
}
