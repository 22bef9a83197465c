//! Steps: begin, commit, abort, several of them open, and operations in between.

use chunkcache::error::Error;
use chunkcache::tree::{CopyChunk, Inherited, PrefixTree, SeqHandle};

use crate::support::{numbers, tree};

fn computed(tree: &PrefixTree, seq: SeqHandle) -> usize {
    tree.sequence(seq).unwrap().num_computed_tokens
}

#[test]
fn tokens_are_written_when_their_step_is_committed() {
    let mut tree = tree(16, 4);
    let seq = tree.insert(&numbers(8), b"").unwrap().seq;
    let step = tree.begin_step(&[(seq, 8)]).unwrap();
    assert_eq!((step.rows[0].start, step.rows[0].len, step.rows[0].num_cached_rows), (0, 8, 0));
    assert_eq!(tree.match_prefix(&numbers(8), b"").num_filled, 0);
    assert_eq!(computed(&tree, seq), 0);
    tree.commit_step(step.id).unwrap();
    assert_eq!(tree.match_prefix(&numbers(8), b"").num_filled, 8);
    assert_eq!(computed(&tree, seq), 8);
}

#[test]
fn an_aborted_step_writes_nothing_and_can_be_made_again() {
    let mut tree = tree(16, 4);
    let seq = tree.insert(&numbers(8), b"").unwrap().seq;
    let step = tree.begin_step(&[(seq, 5)]).unwrap();
    tree.abort_step(step.id).unwrap();
    assert_eq!((tree.match_prefix(&numbers(8), b"").num_filled, computed(&tree, seq)), (0, 0));
    assert!(matches!(tree.commit_step(step.id), Err(Error::ClosedPlan { .. })));
    let step = tree.begin_step(&[(seq, 8)]).unwrap();
    assert_eq!(step.rows[0].start, 0);
    tree.commit_step(step.id).unwrap();
    tree.check_invariants().unwrap();
}

#[test]
fn the_next_step_begins_while_one_runs_before_its_token_is_known() {
    let mut tree = tree(16, 4);
    let seq = tree.insert(&numbers(4), b"").unwrap().seq;
    let first = tree.begin_step(&[(seq, 4)]).unwrap();
    tree.reserve(&[seq]).unwrap();
    let second = tree.begin_step(&[(seq, 1)]).unwrap();
    assert_eq!(second.rows[0].start, 4);
    tree.append(seq, &[9]).unwrap();
    tree.commit_step(first.id).unwrap();
    tree.commit_step(second.id).unwrap();
    assert_eq!((computed(&tree, seq), tree.tokens(seq).unwrap().len()), (5, 5));
    tree.check_invariants().unwrap();
}

#[test]
fn steps_are_committed_in_order() {
    let mut tree = tree(16, 4);
    let seq = tree.insert(&numbers(8), b"").unwrap().seq;
    let first = tree.begin_step(&[(seq, 4)]).unwrap();
    let second = tree.begin_step(&[(seq, 4)]).unwrap();
    assert!(matches!(tree.commit_step(second.id), Err(Error::InvalidConfig { .. })));
    tree.commit_step(first.id).unwrap();
    tree.commit_step(second.id).unwrap();
}

#[test]
fn an_abort_makes_later_steps_stale() {
    let mut tree = tree(16, 4);
    let seq = tree.insert(&numbers(8), b"").unwrap().seq;
    let first = tree.begin_step(&[(seq, 4)]).unwrap();
    let second = tree.begin_step(&[(seq, 4)]).unwrap();
    tree.abort_step(first.id).unwrap();
    assert!(matches!(tree.commit_step(second.id), Err(Error::AbandonedPlan { .. })));
    let again = tree.begin_step(&[(seq, 8)]).unwrap();
    tree.commit_step(again.id).unwrap();
    tree.abort_step(second.id).unwrap();
    assert_eq!(computed(&tree, seq), 8);
    tree.check_invariants().unwrap();
}

#[test]
fn an_abort_leaves_later_steps_alone_that_do_not_build_on_it() {
    let mut tree = tree(16, 4);
    let [a, b] = [1, 2].map(|token| tree.insert(&[token; 6], b"").unwrap().seq);
    let first = tree.begin_step(&[(a, 6)]).unwrap();
    let second = tree.begin_step(&[(b, 3)]).unwrap();
    let third = tree.begin_step(&[(b, 3)]).unwrap();
    let sharer = tree.insert(&[1, 1, 1, 1, 7], b"").unwrap().seq;
    let fourth = tree.begin_step(&[(sharer, 1)]).unwrap();
    tree.abort_step(first.id).unwrap();
    tree.check_invariants().unwrap();
    tree.commit_step(second.id).unwrap();
    tree.commit_step(third.id).unwrap();
    assert_eq!((computed(&tree, a), computed(&tree, b)), (0, 6));
    assert!(matches!(tree.commit_step(fourth.id), Err(Error::AbandonedPlan { .. })));
    tree.abort_step(fourth.id).unwrap();
    tree.check_invariants().unwrap();
}

#[test]
fn a_watch_tells_of_an_earlier_abort_and_not_of_one_in_a_copy_of_the_tree() {
    let mut tree = tree(16, 4);
    let seq = tree.insert(&numbers(8), b"").unwrap().seq;
    let first = tree.begin_step(&[(seq, 4)]).unwrap();
    let second = tree.begin_step(&[(seq, 4)]).unwrap();
    let watch = tree.watch_step(second.id).unwrap();
    let mut copy = tree.clone();
    copy.abort_step(first.id).unwrap();
    assert!(!watch.is_stale() && copy.watch_step(second.id).unwrap().is_stale());
    tree.abort_step(first.id).unwrap();
    assert!(watch.is_stale());
    tree.abort_step(second.id).unwrap();
    assert!(matches!(tree.watch_step(second.id), Err(Error::ClosedPlan { .. })));
}

#[test]
fn the_order_of_rows_does_not_matter() {
    let mut tree = tree(16, 4);
    let writer = tree.insert(&numbers(8), b"").unwrap().seq;
    let reader = tree.insert(&numbers(8), b"").unwrap().seq;
    let step = tree.begin_step(&[(reader, 1), (writer, 8)]).unwrap();
    assert_eq!((step.rows[0].start, step.rows[0].num_cached_rows), (7, 1));
    tree.commit_step(step.id).unwrap();
}

#[test]
fn a_step_that_builds_on_nothing_changes_nothing() {
    let mut tree = tree(16, 4);
    let writer = tree.insert(&numbers(8), b"").unwrap().seq;
    let reader = tree.insert(&numbers(10), b"").unwrap().seq;
    assert!(tree.begin_step(&[(writer, 4), (reader, 2)]).is_err());
    assert_eq!(tree.sequence(writer).unwrap().num_scheduled_tokens, 0);
    tree.check_invariants().unwrap();
    tree.commit(&[(writer, 8), (reader, 2)]).unwrap();
}

#[test]
fn more_queries_than_tokens_are_refused() {
    let mut tree = tree(16, 4);
    let seq = tree.insert(&numbers(3), b"").unwrap().seq;
    for len in [0, 4] {
        let error = tree.begin_step(&[(seq, len)]).unwrap_err();
        assert!(error.to_string().starts_with(&format!("qo_len[0]: got {len}")), "{error}");
    }
    tree.commit(&[(seq, 3)]).unwrap();
    let error = tree.begin_step(&[(seq, 1)]).unwrap_err();
    assert!(error.to_string().contains("append one first"), "{error}");
}

#[test]
fn a_sequence_removed_under_an_open_step_still_writes() {
    let mut tree = tree(16, 4);
    let writer = tree.insert(&numbers(12), b"").unwrap().seq;
    let sharer = tree.insert(&numbers(12), b"").unwrap().seq;
    let step = tree.begin_step(&[(writer, 6)]).unwrap();
    assert!(tree.remove(writer).unwrap().is_empty());
    assert!(tree.sequence(writer).is_err());
    assert_eq!(tree.stats().num_sequences, 1);
    let committed = tree.commit_step(step.id).unwrap();
    assert_eq!(committed.inherited, [Inherited { seq: sharer, begin: 6, end: 12 }]);
    assert_eq!(tree.match_prefix(&numbers(12), b"").num_filled, 6);
    tree.check_invariants().unwrap();
}

#[test]
fn chunks_freed_under_an_open_step_stay_in_use_until_it_closes() {
    let mut tree = tree(4, 2);
    let seq = tree.insert(&numbers(8), b"").unwrap().seq;
    let step = tree.begin_step(&[(seq, 8)]).unwrap();
    tree.truncate(seq, 3).unwrap();
    assert_eq!((tree.stats().num_free, tree.stats().num_in_use), (0, 4));
    assert!(tree.insert(&[9, 9], b"").is_err());
    tree.commit_step(step.id).unwrap();
    assert_eq!((tree.stats().num_free, computed(&tree, seq)), (2, 3));
    tree.check_invariants().unwrap();
}

#[test]
fn truncation_under_an_open_step_leaves_what_others_build_on() {
    let mut tree = tree(16, 4);
    let writer = tree.insert(&numbers(8), b"").unwrap().seq;
    let sharer = tree.insert(&numbers(8), b"").unwrap().seq;
    let step = tree.begin_step(&[(writer, 8), (sharer, 1)]).unwrap();
    let truncated = tree.truncate(writer, 6).unwrap();
    assert!(truncated.waiting && truncated.copy.is_none());
    let committed = tree.commit_step(step.id).unwrap();
    let (src, dst) = (tree.chunk_ids(sharer).unwrap()[1], tree.chunk_ids(writer).unwrap()[1]);
    assert_eq!(committed.copies, [CopyChunk { src, dst, num_tokens: 2 }]);
    assert_eq!(tree.match_prefix(&numbers(8), b"").num_filled, 8);
    assert_eq!((computed(&tree, writer), computed(&tree, sharer)), (6, 8));
    tree.check_invariants().unwrap();
}

#[test]
fn the_structure_version_changes_with_the_structure_alone() {
    let mut tree = tree(64, 4);
    let seq = tree.insert(&numbers(6), b"").unwrap().seq;
    let version = tree.structure_version();
    tree.commit(&[(seq, 6)]).unwrap();
    tree.append(seq, &[1, 2, 3]).unwrap();
    assert_eq!(tree.structure_version(), version);
    tree.insert(&numbers(6), b"").unwrap();
    assert_ne!(tree.structure_version(), version);
}

#[test]
fn segments_lead_from_the_leaf_to_the_first_chunk() {
    let mut tree = tree(64, 2);
    let first = tree.insert(&[1, 1, 2, 2, 3], b"").unwrap().seq;
    tree.insert(&[1, 1, 4], b"").unwrap();
    let leaf = tree.segment(tree.leaf(first).unwrap());
    assert_eq!((leaf.start_pos, leaf.num_tokens, leaf.num_sequences), (2, 3, 1));
    let top = tree.segment(leaf.parent.unwrap());
    assert_eq!((top.start_pos, top.num_tokens, top.num_sequences), (0, 2, 2));
    assert_eq!(top.parent, None);
    assert_eq!((top.run, top.first_chunk, leaf.first_chunk), (leaf.run, 0, 1));
    let ids = [top.chunk_ids, leaf.chunk_ids].concat();
    assert_eq!(tree.chunk_ids(first).unwrap(), ids);
}

#[test]
fn a_run_that_gave_a_chunk_back_has_another_generation() {
    let mut tree = tree(64, 2);
    let seq = tree.insert(&[1, 1, 2, 2, 3], b"").unwrap().seq;
    let run = tree.segment(tree.leaf(seq).unwrap()).run;
    tree.append(seq, &[3, 4]).unwrap();
    assert_eq!(tree.segment(tree.leaf(seq).unwrap()).run, run);
    tree.truncate(seq, 3).unwrap();
    assert_ne!(tree.segment(tree.leaf(seq).unwrap()).run, run);
}

#[test]
fn a_rewound_sequence_queries_what_is_written_without_writing_it() {
    let mut tree = tree(16, 4);
    let first = tree.insert(&numbers(8), b"").unwrap().seq;
    tree.commit(&[(first, 8)]).unwrap();
    let second = tree.insert(&numbers(11), b"").unwrap();
    assert_eq!((second.num_matched_tokens, second.num_computed_tokens), (8, 8));
    tree.rewind(second.seq, 0).unwrap();
    let step = tree.begin_step(&[(second.seq, 5)]).unwrap();
    assert_eq!((step.rows[0].start, step.rows[0].num_cached_rows), (0, 5));
    tree.commit_step(step.id).unwrap();
    let step = tree.begin_step(&[(second.seq, 6)]).unwrap();
    assert_eq!((step.rows[0].start, step.rows[0].num_cached_rows), (5, 3));
    tree.commit_step(step.id).unwrap();
    assert_eq!(computed(&tree, second.seq), 11);
    tree.check_invariants().unwrap();
}

#[test]
fn a_sequence_is_rewound_only_to_what_it_has_computed_and_between_steps() {
    let mut tree = tree(16, 4);
    let seq = tree.insert(&numbers(8), b"").unwrap().seq;
    tree.commit(&[(seq, 3)]).unwrap();
    assert!(matches!(tree.rewind(seq, 4), Err(Error::InvalidConfig { .. })));
    let step = tree.begin_step(&[(seq, 2)]).unwrap();
    assert!(matches!(tree.rewind(seq, 0), Err(Error::InvalidConfig { .. })));
    tree.commit_step(step.id).unwrap();
    tree.rewind(seq, 2).unwrap();
    assert_eq!(computed(&tree, seq), 2);
    tree.check_invariants().unwrap();
}
