//! Plans of a prefix tree's steps: what they say, and what they refuse.

use crate::support::{Copy, Steps, path, tokens};
use chunkcache::error::Error;
use chunkcache::plan::{Limits, NO_SLOT, Planner};
use chunkcache::tree::{PrefixTree, SeqHandle, TreeConfig};

fn steps(capacity: usize) -> Steps {
    Steps::new(capacity, 4, None)
}

#[test]
fn a_prompt_is_planned_as_a_whole() {
    let mut steps = steps(64);
    let seq = steps.insert(&tokens(0, 10));
    let plan = steps.plan(&[Some(seq)], Some(&[0, 10])).unwrap();
    let ids = steps.tree.chunk_ids(seq).unwrap();
    let slot = |position: i64| i64::from(ids[position as usize / 4]) * 4 + position % 4;
    assert_eq!(plan.positions(), (0..10).collect::<Vec<_>>());
    assert_eq!(plan.slot_mapping(), (0..10).map(slot).collect::<Vec<_>>());
}

#[test]
fn shared_chunks_are_one_segment_and_the_tails_private() {
    let mut steps = steps(64);
    let seqs: Vec<_> =
        (0..3).map(|i| steps.insert(&[tokens(0, 8), tokens(9 + i, 3)].concat())).collect();
    steps.run(&[Some(seqs[0]), Some(seqs[1]), Some(seqs[2])], Some(&[0, 11, 14, 17])).unwrap();
    let view = steps.planner.image().view();
    let shared: Vec<_> = view
        .segment_order
        .iter()
        .map(|&row| view.segments[row as usize])
        .filter(|segment| segment.seq_end - segment.seq_begin > 1)
        .collect();
    assert_eq!(shared.len(), 1);
    assert_eq!((shared[0].num_pages, shared[0].seq_begin, shared[0].seq_end), (2, 0, 3));
}

#[test]
fn a_branch_outside_the_batch_does_not_cut_a_segment() {
    let mut steps = steps(64);
    let first = steps.insert(&tokens(0, 16));
    steps.run(&[Some(first)], Some(&[0, 16])).unwrap();
    let second = steps.insert(&[tokens(0, 8), tokens(50, 4)].concat());
    steps.tree.append(first, &[1]).unwrap();
    steps.run(&[Some(first)], None).unwrap();
    assert_eq!(path(&steps.planner.image().view(), 0).len(), 1);
    steps.tree.append(first, &[1]).unwrap();
    steps.run(&[Some(first), Some(second)], Some(&[0, 1, 5])).unwrap();
    assert_eq!(steps.planner.image().view().segment_order.len(), 3);
}

#[test]
fn padding_rows_have_no_sequence_position_or_slot() {
    let mut steps = steps(64);
    let seq = steps.insert(&tokens(0, 3));
    let plan = steps.plan(&[None, Some(seq), None], Some(&[0, 2, 5, 6])).unwrap();
    assert_eq!(plan.positions(), [0, 0, 0, 1, 2, 0]);
    let padding = [0, 1, 5].map(|row| plan.slot_mapping()[row]);
    assert_eq!(padding, [NO_SLOT; 3]);
    assert_eq!(plan.view(steps.planner.image()).unwrap().num_qo_rows, 6);
}

#[test]
fn a_cached_prompt_has_a_query_without_a_slot() {
    let mut steps = steps(64);
    let first = steps.insert(&tokens(0, 8));
    steps.run(&[Some(first)], Some(&[0, 8])).unwrap();
    let second = steps.insert(&tokens(0, 8));
    let plan = steps.plan(&[Some(second)], None).unwrap();
    assert_eq!((plan.positions(), plan.slot_mapping()), (&[7][..], &[NO_SLOT][..]));
}

#[test]
fn equal_prompts_are_computed_once_in_one_step() {
    let mut steps = steps(64);
    let seqs = [steps.insert(&tokens(0, 9)), steps.insert(&tokens(0, 9))];
    let plan = steps.plan(&[Some(seqs[1]), Some(seqs[0])], Some(&[0, 1, 10])).unwrap();
    let written: Vec<_> = plan.slot_mapping().iter().filter(|&&slot| slot != NO_SLOT).collect();
    assert_eq!(written.len(), 10);
}

/// Runs `plan` and checks that it fails at `argument`, and leaves tree and tables as they were.
fn refused(steps: &mut Steps, batch: &[Option<SeqHandle>], indptr: Option<&[u32]>) -> Error {
    let words = steps.planner.image().words().to_vec();
    let version = steps.planner.image().version();
    let before = format!("{:?}", steps.tree.stats());
    let ready: Vec<_> =
        steps.live().into_iter().map(|seq| steps.tree.sequence(seq).unwrap()).collect();
    let error = steps.planner.plan(&mut steps.tree, batch, indptr).unwrap_err();
    assert_eq!(steps.planner.image().words(), words);
    assert_eq!(steps.planner.image().version(), version);
    assert_eq!(format!("{:?}", steps.tree.stats()), before);
    let after: Vec<_> =
        steps.live().into_iter().map(|seq| steps.tree.sequence(seq).unwrap()).collect();
    assert_eq!(ready, after);
    error
}

#[test]
fn errors_name_the_entry_of_the_callers_batch() {
    let mut steps = steps(64);
    let seq = steps.insert(&tokens(0, 6));
    let gone = steps.insert(&tokens(30, 5));
    steps.remove(gone);
    let done = steps.insert(&tokens(60, 2));
    steps.run(&[Some(done)], Some(&[0, 2])).unwrap();
    let cases: [(&[_], Option<&[u32]>, &str); 10] = [
        (&[None, Some(seq), Some(seq)], None, "batch[2]"),
        (&[None, Some(gone)], None, "batch[1]"),
        (&[None, None, Some(done)], None, "batch[2]"),
        (&[None, None, Some(done)], Some(&[0, 0, 0, 1]), "batch[2]"),
        (&[Some(seq), None], Some(&[0, 7, 7]), "qo_indptr[1]"),
        (&[Some(seq)], Some(&[0, 0]), "qo_indptr[1]"),
        (&[None, Some(seq)], Some(&[0, 1, 1]), "qo_indptr[2]"),
        (&[Some(seq)], Some(&[0, 6, 7]), "qo_indptr"),
        (&[Some(seq)], Some(&[1, 2]), "qo_indptr[0]"),
        (&[Some(seq), None, None], Some(&[0, 6, 5, 8]), "qo_indptr[2]"),
    ];
    for (batch, indptr, name) in cases {
        match refused(&mut steps, batch, indptr) {
            Error::InvalidConfig { argument, .. } | Error::UnknownSequence { argument, .. } => {
                assert_eq!(argument, name);
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_monstrous_qo_indptr_is_refused() {
    let error = refused(&mut steps(8), &[None], Some(&[0, u32::MAX]));
    assert!(error.to_string().starts_with("qo_indptr[1]: got 4294967295"), "{error}");
}

#[test]
fn a_step_past_a_capacity_names_it_and_changes_nothing() {
    let limits = [
        ("max_sequences", Limits { max_sequences: 2, max_segments: 99, max_page_ids: 1024 * 8 }),
        ("max_segments", Limits { max_sequences: 9, max_segments: 3, max_page_ids: 1024 * 8 }),
        ("max_page_ids", Limits { max_sequences: 9, max_segments: 99, max_page_ids: 1024 * 2 }),
    ];
    for (name, limits) in limits {
        let mut steps = Steps::new(4096, 4, Some(limits));
        let long = steps.insert(&tokens(0, 4 * 1000));
        steps.run(&[Some(long)], Some(&[0, 4000])).unwrap();
        let other = steps.insert(&tokens(5000, 4 * 1100));
        let third = steps.insert(&[tokens(0, 8), tokens(9000, 4)].concat());
        steps.tree.append(long, &[7]).unwrap();
        let error =
            refused(&mut steps, &[Some(long), Some(other), Some(third)], Some(&[0, 1, 4401, 4405]));
        assert!(error.to_string().contains(&format!("at most {name} = ")), "{error}");
        assert!(steps.run(&[Some(long)], None).is_ok());
    }
}

#[test]
fn a_leaf_that_grows_past_a_capacity_is_refused() {
    let limits = Limits { max_sequences: 2, max_segments: 2, max_page_ids: 1024 * 2 };
    let mut steps = Steps::new(8192, 4, Some(limits));
    let seq = steps.insert(&tokens(0, 4 * 2048));
    steps.run(&[Some(seq)], Some(&[0, 4 * 2048])).unwrap();
    steps.tree.append(seq, &[7]).unwrap();
    let error = refused(&mut steps, &[Some(seq)], None);
    assert!(error.to_string().contains("at most max_page_ids = 2048"), "{error}");
}

#[test]
fn room_of_sequences_that_left_is_used_again() {
    let limits = Limits { max_sequences: 1, max_segments: 1, max_page_ids: 1024 };
    let mut steps = Steps::new(8192, 4, Some(limits));
    for i in 0..4 {
        let seq = steps.insert(&tokens(i * 10_000, 4 * 1000));
        steps.run(&[Some(seq)], Some(&[0, 4000])).unwrap();
        steps.remove(seq);
    }
}

#[test]
fn an_aborted_step_is_planned_again() {
    let mut steps = steps(64);
    let seq = steps.insert(&tokens(0, 6));
    let mut plan = steps.planner.plan(&mut steps.tree, &[Some(seq)], Some(&[0, 6])).unwrap();
    steps.tree.abort_step(plan.close().unwrap()).unwrap();
    let again = steps.plan(&[Some(seq)], Some(&[0, 6])).unwrap();
    assert_eq!(again.positions(), plan.positions());
    let diff = steps.planner.image().diff_since(plan.epoch());
    assert!(diff.is_empty() && !diff.advance, "{diff:?}");
}

#[test]
fn the_next_step_is_planned_while_one_is_open() {
    let mut steps = steps(64);
    let seq = steps.insert(&tokens(0, 6));
    let mut first = steps.planner.plan(&mut steps.tree, &[Some(seq)], Some(&[0, 6])).unwrap();
    steps.tree.reserve(&[seq]).unwrap();
    let mut second = steps.planner.plan(&mut steps.tree, &[Some(seq)], None).unwrap();
    assert_eq!(second.positions(), [6]);
    steps.tree.commit_step(first.close().unwrap()).unwrap();
    steps.tree.append(seq, &[1]).unwrap();
    steps.tree.commit_step(second.close().unwrap()).unwrap();
    assert_eq!(steps.tree.sequence(seq).unwrap().num_computed_tokens, 7);
}

#[test]
fn a_plan_is_stale_after_the_next_one() {
    let mut steps = steps(64);
    let seq = steps.insert(&tokens(0, 6));
    let first = steps.planner.plan(&mut steps.tree, &[Some(seq)], Some(&[0, 3])).unwrap();
    let second = steps.planner.plan(&mut steps.tree, &[Some(seq)], Some(&[0, 3])).unwrap();
    let stale = Error::StalePlan { plan: first.epoch() };
    assert_eq!(first.view(steps.planner.image()).unwrap_err(), stale);
    assert!(second.view(steps.planner.image()).is_ok());
}

#[test]
fn a_plan_behind_an_aborted_one_is_refused() {
    let mut steps = steps(64);
    let seq = steps.insert(&tokens(0, 6));
    let mut first = steps.planner.plan(&mut steps.tree, &[Some(seq)], Some(&[0, 3])).unwrap();
    let second = steps.planner.plan(&mut steps.tree, &[Some(seq)], Some(&[0, 3])).unwrap();
    assert!(second.view(steps.planner.image()).is_ok());
    steps.tree.abort_step(first.close().unwrap()).unwrap();
    let abandoned = Error::AbandonedPlan { plan: second.epoch() };
    assert_eq!(second.view(steps.planner.image()).unwrap_err(), abandoned);
}

#[test]
fn a_closed_plan_is_stale() {
    let mut steps = steps(64);
    let seq = steps.insert(&tokens(0, 6));
    let mut plan = steps.planner.plan(&mut steps.tree, &[Some(seq)], Some(&[0, 6])).unwrap();
    steps.tree.commit_step(plan.close().unwrap()).unwrap();
    assert!(plan.close().is_none());
    assert!(matches!(plan.view(steps.planner.image()), Err(Error::ClosedPlan { .. })));
}

#[test]
fn a_plan_outlives_later_operations_on_the_tree() {
    let mut steps = steps(64);
    let seqs = [steps.insert(&tokens(0, 9)), steps.insert(&tokens(0, 9))];
    let plan = steps.planner.plan(&mut steps.tree, &[Some(seqs[0])], Some(&[0, 9])).unwrap();
    let words = steps.planner.image().words().to_vec();
    steps.remove(seqs[1]);
    steps.insert(&tokens(0, 5));
    steps.tree.append(seqs[0], &[1, 2, 3, 4, 5]).unwrap();
    assert!(plan.view(steps.planner.image()).is_ok());
    assert_eq!(steps.planner.image().words(), words);
}

#[test]
fn a_planner_of_another_chunk_size_is_refused() {
    let mut tree = PrefixTree::new(TreeConfig::new(8, 4)).unwrap();
    let seq = tree.insert(&[1], b"").unwrap().seq;
    let mut planner = Planner::new(8, Planner::default_limits(8, 8)).unwrap();
    let error = planner.plan(&mut tree, &[Some(seq)], None).unwrap_err();
    assert!(error.to_string().starts_with("tree: got chunks of 4 tokens"), "{error}");
}

#[test]
fn a_copy_far_behind_gets_the_blocks_that_changed() {
    let mut steps = steps(4096);
    let seq = steps.insert(&tokens(0, 6));
    let mut copy = Copy::default();
    steps.run(&[Some(seq)], Some(&[0, 6])).unwrap();
    let first = copy.sync(steps.planner.image());
    for i in 0..20 {
        steps.tree.append(seq, &[i]).unwrap();
        steps.run(&[Some(seq)], None).unwrap();
    }
    let later = copy.sync(steps.planner.image());
    assert_eq!(copy.words, steps.planner.image().words());
    // The header and five sections: a block of 128 words each, of some 40,000 words.
    assert!(first <= 6 * 128 && later <= 6 * 128, "{first} {later} of {}", copy.words.len());
    assert!(copy.words.len() > 40_000);
    let unknown = steps.planner.image().diff_since(1 << 40);
    assert_eq!(unknown.num_words(), copy.words.len());
}

#[test]
fn a_leaf_that_grows_where_others_were_evicted_gets_its_own_chunk() {
    let mut steps = steps(64);
    let other = steps.insert(&tokens(7, 4));
    let long = steps.insert(&tokens(0, 8 * 4));
    steps.run(&[Some(other), Some(long)], Some(&[0, 4, 36])).unwrap();
    steps.remove(long);
    let short = steps.insert(&tokens(0, 5 * 4));
    steps.tree.append(other, &[1, 2, 3, 4]).unwrap();
    steps.run(&[Some(other), Some(short)], Some(&[0, 4, 5])).unwrap();
    assert_eq!(steps.tree.evict(3), 3);
    // Both grow in place: one takes the chunk that the other's run had there.
    steps.tree.append_batch(&[other, short], &[5, 5]).unwrap();
    steps.run(&[Some(other), Some(short)], None).unwrap();
}
