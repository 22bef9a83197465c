//! How many words of the tables a step changes: counted, for trees of different sizes.

use chunkcache::plan::Diff;
use chunkcache::tree::SeqHandle;

use crate::support::{Steps, compute, tokens};

const CHUNK: u32 = 64;

/// Words of a sequence row and its place in the order, and of a segment row and its place.
const SEQUENCE: usize = 6;
const SEGMENT: usize = 7;

/// Header words that may change.
const HEADER: usize = 3;

/// Words by which the same step may differ: unchanged ones between two changed ones are sent too.
const GAPS: usize = 12;

/// What a batch is like: `num_sequences` sequences behind a prompt of `shared` chunks, each with
/// `own` chunks less one token of its own, in a tree that retains `retained` other chunks.
#[derive(Debug, Clone, Copy)]
struct Shape {
    num_sequences: u32,
    shared: u32,
    own: u32,
    retained: u32,
}

const SMALL: Shape = Shape { num_sequences: 30, shared: 10, own: 3, retained: 0 };

impl Shape {
    /// The batch, with all its prompts computed.
    fn build(self) -> (Steps, Vec<SeqHandle>) {
        let mut steps = Steps::new(1 << 13, CHUNK as usize, None);
        if self.retained > 0 {
            let other = steps.insert(&tokens(999, self.retained * CHUNK));
            compute(&mut steps, &[other]);
            steps.remove(other);
        }
        let prompt =
            |i| [tokens(0, self.shared * CHUNK), tokens(1 + i, self.own * CHUNK - 1)].concat();
        let seqs: Vec<_> = (0..self.num_sequences).map(|i| steps.insert(&prompt(i))).collect();
        compute(&mut steps, &seqs);
        (steps, seqs)
    }
}

/// Decodes one token of each and returns what changed.
fn decode(steps: &mut Steps, seqs: &[SeqHandle]) -> Diff {
    steps.tree.append_batch(seqs, &vec![3; seqs.len()]).unwrap();
    compute(steps, seqs)
}

/// Words that change when a sequence with `own` chunks of its own joins the batch.
fn join(shape: Shape, own: u32) -> usize {
    let (mut steps, mut seqs) = shape.build();
    decode(&mut steps, &seqs);
    let prompt = [tokens(0, shape.shared * CHUNK), tokens(5000, own * CHUNK - 1)].concat();
    let new = steps.insert(&prompt);
    steps.tree.append_batch(&seqs, &vec![3; seqs.len()]).unwrap();
    seqs.insert(seqs.len() / 2, new);
    compute(&mut steps, &seqs).num_words()
}

/// Words that change when one sequence leaves the batch.
fn leave(shape: Shape) -> usize {
    let (mut steps, mut seqs) = shape.build();
    decode(&mut steps, &seqs);
    let gone = seqs.remove(seqs.len() / 2);
    steps.remove(gone);
    decode(&mut steps, &seqs).num_words()
}

/// All rows of a batch behind one prompt, the words between them, and `ids` chunk ids.
fn bound(num_sequences: u32, ids: u32) -> usize {
    let num_segments = num_sequences as usize + 2;
    SEQUENCE * num_sequences as usize + SEGMENT * num_segments + ids as usize + HEADER + GAPS
}

#[test]
fn steady_decoding_changes_nothing() {
    let (mut steps, seqs) = SMALL.build();
    decode(&mut steps, &seqs);
    decode(&mut steps, &seqs);
    for _ in 0..CHUNK - 2 {
        let diff = decode(&mut steps, &seqs);
        assert!(diff.is_empty() && diff.advance, "{diff:?}");
    }
}

#[test]
fn a_leaf_that_fills_costs_two_words() {
    let (mut steps, mut seqs) = SMALL.build();
    let short = steps.insert(&tokens(77, CHUNK - 9));
    seqs.push(short);
    compute(&mut steps, &seqs[30..]);
    for _ in 0..9 {
        decode(&mut steps, &seqs);
    }
    let diff = decode(&mut steps, &seqs);
    assert_eq!((diff.num_words(), diff.advance), (2, true), "{diff:?}");
}

#[test]
fn leaves_that_fill_together_cost_two_words_each() {
    let (mut steps, seqs) = SMALL.build();
    decode(&mut steps, &seqs);
    assert_eq!(decode(&mut steps, &seqs).num_words(), 2 * seqs.len());
}

#[test]
fn a_leaf_that_enters_a_new_block_costs_a_row() {
    let (mut steps, seqs) = Shape { num_sequences: 3, shared: 0, own: 64, retained: 0 }.build();
    decode(&mut steps, &seqs);
    let diff = decode(&mut steps, &seqs);
    // Each: the id, the row and its place, and the sequence's leaf. Once: the number of rows.
    assert!(diff.num_words() <= 3 * (SEGMENT + 2) + 1 && diff.advance, "{diff:?}");
    assert_eq!(steps.planner.image().view().segment_order.len(), 6);
}

#[test]
fn a_first_chunk_of_ones_own_costs_a_row() {
    // Words of the first decoded token of 20 sequences, one of which has only the prompt so far.
    let words = |tail: u32| {
        let mut steps = Steps::new(4096, CHUNK as usize, None);
        let prompt = |i: u32| {
            let tail = if i == 0 { tail } else { 5 };
            [tokens(0, 4 * CHUNK), tokens(1 + i, tail)].concat()
        };
        let seqs: Vec<_> = (0..20).map(|i| steps.insert(&prompt(i))).collect();
        compute(&mut steps, &seqs);
        decode(&mut steps, &seqs).num_words()
    };
    let (with, without) = (words(0), words(5));
    assert!(with <= without + SEGMENT + 3, "{with} {without}");
}

#[test]
fn a_join_costs_rows_and_its_own_chunks() {
    let words = join(SMALL, 5);
    assert!(words <= bound(31, 5), "{words}");
}

#[test]
fn a_join_does_not_cost_more_behind_others_chunks() {
    let words = join(SMALL, 5);
    for shape in [
        Shape { shared: 60, ..SMALL },
        Shape { own: 40, ..SMALL },
        Shape { retained: 1500, ..SMALL },
    ] {
        let other = join(shape, 5);
        assert!(other.abs_diff(words) <= GAPS, "{words} {other} {shape:?}");
    }
}

#[test]
fn a_join_costs_a_word_for_each_chunk_of_its_own() {
    assert_eq!(join(SMALL, 45) - join(SMALL, 5), 40);
}

#[test]
fn a_leave_costs_rows_alone() {
    let words = leave(SMALL);
    assert!(words <= bound(29, 0), "{words}");
}

#[test]
fn a_leave_does_not_cost_more_behind_others_chunks() {
    let words = leave(SMALL);
    for shape in [
        Shape { shared: 60, ..SMALL },
        Shape { own: 40, ..SMALL },
        Shape { retained: 1500, ..SMALL },
    ] {
        let other = leave(shape);
        assert!(other.abs_diff(words) <= GAPS, "{words} {other} {shape:?}");
    }
}

#[test]
fn a_split_of_a_long_segment_costs_rows_alone() {
    let mut steps = Steps::new(1 << 13, CHUNK as usize, None);
    let first = steps.insert(&tokens(0, 60 * CHUNK + 5));
    compute(&mut steps, &[first]);
    let second = steps.insert(&[tokens(0, 30 * CHUNK), tokens(7, 3)].concat());
    steps.tree.append(first, &[1]).unwrap();
    let words = compute(&mut steps, &[first, second]).num_words();
    assert!(words <= bound(2, 1), "{words}");
}

#[test]
fn eviction_of_a_shared_runs_end_sends_no_chunk_again() {
    let mut steps = Steps::new(1 << 13, CHUNK as usize, None);
    let long = steps.insert(&tokens(0, 50 * CHUNK));
    compute(&mut steps, &[long]);
    let prompt = |i: u32| [tokens(0, 20 * CHUNK), tokens(1 + i, 9)].concat();
    let seqs: Vec<_> = (0..2).map(|i| steps.insert(&prompt(i))).collect();
    compute(&mut steps, &seqs);
    steps.remove(long);
    decode(&mut steps, &seqs);
    assert_eq!(steps.tree.evict(1000), 30);
    // A new sequence, so that the tables are made anew.
    let words = decode(&mut steps, &seqs[..1]).num_words();
    assert!(words <= HEADER + SEGMENT, "{words}");
}

#[test]
fn batches_that_take_turns_do_not_send_their_chunks_again() {
    let (mut steps, seqs) = Shape { num_sequences: 20, shared: 10, own: 50, retained: 0 }.build();
    let (left, right) = seqs.split_at(10);
    for _ in 0..3 {
        for half in [left, right] {
            let words = decode(&mut steps, half).num_words();
            assert!(words <= bound(10, 10), "{words}");
        }
    }
}
