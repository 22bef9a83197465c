//! Random interleavings of all operations of the tree against a simple model.

mod common;

use std::time::Duration;

use chunkcache::tree::{Clock, PinHandle, SeqHandle, TreeConfig};
use common::Model;
use proptest::prelude::*;
use proptest::sample::Index;

#[derive(Debug, Clone)]
enum Op {
    Insert { family: u32, len: usize, tail: Vec<u32>, salt: u8 },
    InsertLike { seq: Index, len: Index, tail: Vec<u32> },
    Append { seq: Index, tokens: Vec<u32> },
    AppendBatch { mask: u16, token: u32 },
    Reserve { mask: u16, token: u32 },
    CancelReserved { seq: Index },
    Fork { seq: Index },
    Truncate { seq: Index, len: Index },
    Remove { seq: Index },
    UseRemoved { handle: Index },
    Begin { mask: u16, lens: u64 },
    BeginAll,
    Commit { step: Index },
    CommitOldest,
    Abort { step: Index },
    Pin { seq: Index, len: Index, seconds: Option<u8> },
    Unpin { pin: Index },
    Wait { seconds: u8 },
    Evict { count: usize },
    Clear,
}

fn tokens(count: std::ops::Range<usize>) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0_u32..3, count)
}

fn op() -> impl Strategy<Value = Op> {
    let index = any::<Index>;
    prop_oneof![
        4 => (0_u32..3, 0_usize..24, tokens(0..4), 0_u8..2)
            .prop_map(|(family, len, tail, salt)| Op::Insert { family, len, tail, salt }),
        4 => (index(), index(), tokens(0..6))
            .prop_map(|(seq, len, tail)| Op::InsertLike { seq, len, tail }),
        4 => (index(), tokens(1..6)).prop_map(|(seq, tokens)| Op::Append { seq, tokens }),
        3 => (any::<u16>(), 0_u32..3).prop_map(|(mask, token)| Op::AppendBatch { mask, token }),
        2 => (any::<u16>(), 0_u32..3).prop_map(|(mask, token)| Op::Reserve { mask, token }),
        1 => index().prop_map(|seq| Op::CancelReserved { seq }),
        3 => index().prop_map(|seq| Op::Fork { seq }),
        2 => (index(), index()).prop_map(|(seq, len)| Op::Truncate { seq, len }),
        3 => index().prop_map(|seq| Op::Remove { seq }),
        1 => index().prop_map(|handle| Op::UseRemoved { handle }),
        3 => (any::<u16>(), any::<u64>()).prop_map(|(mask, lens)| Op::Begin { mask, lens }),
        3 => Just(Op::BeginAll),
        1 => index().prop_map(|step| Op::Commit { step }),
        5 => Just(Op::CommitOldest),
        1 => index().prop_map(|step| Op::Abort { step }),
        1 => (index(), index(), prop::option::of(0_u8..5))
            .prop_map(|(seq, len, seconds)| Op::Pin { seq, len, seconds }),
        1 => index().prop_map(|pin| Op::Unpin { pin }),
        1 => (0_u8..4).prop_map(|seconds| Op::Wait { seconds }),
        1 => (0_usize..8).prop_map(|count| Op::Evict { count }),
        1 => Just(Op::Clear),
    ]
}

/// A prompt of one of a few families, so that prompts often share a prefix.
fn prompt(family: u32, len: usize, tail: &[u32]) -> Vec<u32> {
    let mut tokens: Vec<u32> =
        (0..len as u32).map(|position| (position * (family / 2 + 1)) % 3 + 10).collect();
    tokens.extend_from_slice(tail);
    if tokens.is_empty() {
        tokens.push(family);
    }
    tokens
}

struct Run {
    model: Model,
    clock: chunkcache::tree::ManualClock,
    pins: Vec<PinHandle>,
}

impl Run {
    fn pick(&self, index: &Index) -> Option<usize> {
        let count = self.model.sequences.len();
        (count > 0).then(|| index.index(count))
    }

    fn pick_many(&self, mask: u16) -> Vec<usize> {
        (0..self.model.sequences.len().min(16)).filter(|i| mask >> i & 1 == 1).collect()
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Insert { family, len, tail, salt } => {
                self.model.insert(prompt(*family, *len, tail), &vec![b'a'; *salt as usize]);
            }
            Op::InsertLike { seq, len, tail } => {
                let Some(i) = self.pick(seq) else { return };
                let like = &self.model.sequences[i];
                let mut tokens = like.tokens[..=len.index(like.tokens.len())].to_vec();
                tokens.extend_from_slice(tail);
                let salt = like.salt.clone();
                self.model.insert(tokens, &salt);
            }
            Op::Append { seq, tokens } => {
                let Some(i) = self.pick(seq) else { return };
                self.model.append(i, tokens);
            }
            Op::AppendBatch { mask, token } => {
                let indices = self.pick_many(*mask);
                self.model.append_batch(&indices, *token);
            }
            Op::Reserve { mask, token } => {
                let indices = self.pick_many(*mask);
                self.model.reserve(&indices, *token);
            }
            Op::CancelReserved { seq } => {
                let Some(i) = self.pick(seq) else { return };
                self.model.cancel_reserved(i);
            }
            Op::Fork { seq } => {
                let Some(i) = self.pick(seq) else { return };
                self.model.fork(i);
            }
            Op::Truncate { seq, len } => {
                let Some(i) = self.pick(seq) else { return };
                let len = len.index(self.model.sequences[i].tokens.len() + 1);
                self.model.truncate(i, len);
            }
            Op::Remove { seq } => {
                let Some(i) = self.pick(seq) else { return };
                self.model.remove(i);
            }
            Op::UseRemoved { handle } => {
                if self.model.removed.is_empty() {
                    return;
                }
                let handle = self.model.removed[handle.index(self.model.removed.len())];
                self.use_removed(handle);
            }
            Op::Begin { mask, lens } => {
                let mut batch = Vec::new();
                for i in self.pick_many(*mask) {
                    let info = self.info(i);
                    let left = info.num_tokens - info.num_scheduled_tokens;
                    batch.push((i, (lens >> i) as usize % (left + 1)));
                }
                batch.retain(|row| row.1 > 0);
                self.model.begin(&batch);
            }
            Op::BeginAll => {
                let mut batch = Vec::new();
                for i in 0..self.model.sequences.len() {
                    let info = self.info(i);
                    let left = info.num_tokens - info.num_scheduled_tokens;
                    if !info.is_waiting && left > 0 {
                        batch.push((i, left));
                    }
                }
                self.model.begin(&batch);
            }
            Op::Commit { step } => {
                let count = self.model.num_open_steps();
                if count > 0 {
                    self.model.commit(step.index(count));
                }
            }
            Op::CommitOldest => {
                if self.model.num_open_steps() > 0 {
                    self.model.commit(0);
                }
            }
            Op::Abort { step } => {
                let count = self.model.num_open_steps();
                if count > 0 {
                    self.model.abort(step.index(count));
                }
            }
            Op::Pin { seq, len, seconds } => {
                let Some(i) = self.pick(seq) else { return };
                let sequence = &self.model.sequences[i];
                let tokens = &sequence.tokens[..=len.index(sequence.tokens.len())];
                let time = seconds.map(|seconds| Duration::from_secs(seconds.into()));
                if let Ok(pinned) = self.model.tree.pin(tokens, &sequence.salt, time) {
                    self.pins.push(pinned.pin);
                }
            }
            Op::Unpin { pin } => {
                if !self.pins.is_empty() {
                    let pin = self.pins.swap_remove(pin.index(self.pins.len()));
                    // It may have ended by itself.
                    let _ = self.model.tree.unpin(pin);
                    assert!(self.model.tree.unpin(pin).is_err());
                }
            }
            Op::Wait { seconds } => self.clock.advance(Duration::from_secs((*seconds).into())),
            Op::Evict { count } => {
                let evictable = self.model.tree.stats().num_evictable;
                let free = self.model.tree.stats().num_free;
                let evicted = self.model.tree.evict(*count);
                assert!(evicted >= evictable.min(*count) && evicted <= *count);
                assert_eq!(self.model.tree.stats().num_free, free + evicted);
            }
            Op::Clear => {
                self.model.tree.clear();
                assert_eq!(self.model.tree.stats().num_evictable, 0);
            }
        }
    }

    fn info(&self, i: usize) -> chunkcache::tree::SequenceInfo {
        self.model.tree.sequence(self.model.sequences[i].handle).unwrap()
    }

    fn use_removed(&mut self, handle: SeqHandle) {
        let tree = &mut self.model.tree;
        assert!(tree.remove(handle).is_err());
        assert!(tree.append(handle, &[1]).is_err());
        assert!(tree.fork(handle).is_err());
        assert!(tree.truncate(handle, 1).is_err());
        assert!(tree.begin_step(&[(handle, 1)]).is_err());
    }
}

/// The number of cases, which `PROPTEST_CASES` overrides.
fn config(cases: u32) -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { cases };
    ProptestConfig { cases, failure_persistence: None, ..default }
}

proptest! {
    #![proptest_config(config(2000))]

    #[test]
    fn any_interleaving_agrees_with_the_model(
        ops in prop::collection::vec(op(), 1..80),
        chunk_size in prop::sample::select(vec![1_usize, 2, 3, 4, 8]),
        capacity in prop::sample::select(vec![6_usize, 10, 20, 200]),
        run_at_begin: bool,
        enable_prefix_sharing in prop::bool::weighted(0.9),
    ) {
        let (clock, hand) = Clock::manual();
        let config =
            TreeConfig { clock, enable_prefix_sharing, ..TreeConfig::new(capacity, chunk_size) };
        let mut run =
            Run { model: Model::new(config, run_at_begin), clock: hand, pins: Vec::new() };
        for op in &ops {
            run.apply(op);
            run.model.check();
        }
        run.model.finish();
        while !run.model.sequences.is_empty() {
            run.model.remove(0);
            run.model.check();
        }
        for pin in run.pins.drain(..) {
            let _ = run.model.tree.unpin(pin);
        }
        run.model.check();
        let stats = run.model.tree.stats();
        prop_assert_eq!(stats.num_in_use, 0);
        run.model.tree.clear();
        prop_assert_eq!(run.model.tree.stats().num_free, capacity);
        run.model.check();
    }
}
