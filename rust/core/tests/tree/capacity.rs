//! Capacity: accounts, eviction, pins, exhaustion.

use std::time::Duration;

use chunkcache::error::Error;
use chunkcache::tree::{Clock, PrefixTree, SeqHandle, TreeConfig};

use crate::support::{insert_written, tree};

fn retain(tree: &mut PrefixTree, tokens: &[u32]) {
    let seq = insert_written(tree, tokens);
    tree.remove(seq).unwrap();
}

#[test]
fn a_shared_chunk_counts_once_in_every_account() {
    let mut tree = tree(100, 4);
    let prefix: Vec<u32> = (0..16).collect();
    let mut seqs = Vec::new();
    for tail in 0..10 {
        let mut tokens = prefix.clone();
        tokens.extend([100 + tail, 0]);
        seqs.push(insert_written(&mut tree, &tokens));
    }
    let stats = tree.stats();
    assert_eq!((stats.num_in_use, stats.num_free, stats.num_evictable), (14, 86, 0));
    assert_eq!((stats.logical_tokens, stats.physical_tokens), (180, 36));
    assert_eq!(stats.sharing_ratio, 160.0 / 180.0);
    assert_eq!(stats.capacity_multiplier, 5.0);
    assert!((stats.estimated_capacity_multiplier - 9.0).abs() < 1e-9);
    for seq in seqs {
        tree.remove(seq).unwrap();
    }
    let stats = tree.stats();
    assert_eq!((stats.num_in_use, stats.num_free, stats.num_evictable), (0, 96, 4));
    assert_eq!(
        (stats.logical_tokens, stats.sharing_ratio, stats.capacity_multiplier),
        (0, 0.0, 1.0)
    );
}

#[test]
fn fragmentation_is_measured_and_bounded() {
    let mut tree = tree(100, 8);
    insert_written(&mut tree, &[0; 9]);
    insert_written(&mut tree, &[1; 16]);
    let stats = tree.stats();
    assert_eq!(stats.unused_slots, 7);
    assert_eq!(stats.fragmentation, 7.0 / 25.0);
    assert_eq!(stats.fragmentation_bound, 14.0 / 25.0);
}

#[test]
fn bytes_follow_the_chunks_that_are_not_free() {
    let config = TreeConfig { chunk_bytes: 1000, ..TreeConfig::new(10, 4) };
    let mut tree = PrefixTree::new(config).unwrap();
    insert_written(&mut tree, &[1; 9]);
    assert_eq!(tree.stats().num_bytes, 3000);
}

#[test]
fn queries_and_hits_count_tokens() {
    let mut tree = tree(10, 4);
    insert_written(&mut tree, &[1, 2, 3, 4, 5, 6]);
    insert_written(&mut tree, &[1, 2, 3, 4, 5, 7]);
    insert_written(&mut tree, &[1, 2, 3, 4]);
    tree.match_prefix(&[1, 2, 3, 4], b"");
    let stats = tree.stats();
    assert_eq!((stats.prefix_cache_queries, stats.prefix_cache_hits), (16, 5 + 4));
}

#[test]
fn a_second_removal_is_an_error_that_changes_nothing() {
    let mut tree = tree(10, 4);
    let seq = insert_written(&mut tree, &[1, 2, 3, 4, 5]);
    tree.remove(seq).unwrap();
    let (stats, drawing) = (tree.stats(), tree.render());
    let error = tree.remove(seq).unwrap_err();
    assert_eq!(error, Error::UnknownSequence { argument: "seq".to_owned(), handle: seq.as_u64() });
    // Not even when the slot is in use again.
    let next = insert_written(&mut tree, &[1, 2, 3, 4, 5]);
    assert_ne!(seq, next);
    assert!(tree.remove(seq).is_err());
    tree.remove(next).unwrap();
    assert_eq!(tree.render(), drawing);
    assert_eq!(tree.stats().num_evictable, stats.num_evictable);
}

#[test]
fn the_least_recently_used_leaf_is_evicted_first() {
    let mut tree = tree(6, 2);
    retain(&mut tree, &[1, 1, 2, 2]);
    retain(&mut tree, &[1, 1, 3, 3]);
    retain(&mut tree, &[4, 4]);
    retain(&mut tree, &[1, 1, 2, 2]);
    assert_eq!(tree.evict(1), 1);
    assert_eq!(tree.match_prefix(&[1, 1, 3, 3], b"").num_tokens, 2);
    assert_eq!(tree.evict(1), 1);
    assert_eq!(tree.match_prefix(&[4, 4], b"").num_tokens, 0);
    assert_eq!(tree.evict(1), 1);
    assert_eq!(tree.match_prefix(&[1, 1, 2, 2], b"").num_tokens, 2);
    assert_eq!(tree.stats().num_evicted, 3);
}

#[test]
fn an_insert_evicts_only_what_it_needs() {
    let mut tree = tree(8, 2);
    retain(&mut tree, &[1, 1, 2, 2, 3, 3, 4, 4, 5, 5]);
    retain(&mut tree, &[9, 9]);
    insert_written(&mut tree, &[7, 7, 8, 8, 6, 6]);
    let stats = tree.stats();
    assert_eq!((stats.num_free, stats.num_evictable, stats.num_evicted), (0, 5, 1));
    assert_eq!(tree.match_prefix(&[1, 1, 2, 2, 3, 3, 4, 4, 5, 5], b"").num_tokens, 8);
    tree.check_invariants().unwrap();
}

#[test]
fn an_insert_never_evicts_what_it_matches_or_copies() {
    let mut tree = tree(4, 2);
    retain(&mut tree, &[1, 1, 2, 2]);
    retain(&mut tree, &[3, 3, 4, 4]);
    // Shares one chunk of the older prompt and copies from the next one, though that is the next
    // to be evicted.
    let inserted = tree.insert(&[1, 1, 2, 5, 6, 6], b"").unwrap();
    assert_eq!((inserted.num_matched_tokens, inserted.num_copied_tokens), (2, 1));
    let copy = inserted.copy.unwrap();
    assert!(!tree.chunk_ids(inserted.seq).unwrap()[1..].contains(&copy.src));
    assert_eq!(tree.match_prefix(&[1, 1, 2, 2], b"").num_tokens, 4);
    tree.check_invariants().unwrap();
}

#[test]
fn the_copied_chunk_stays_when_the_rest_of_its_prompt_is_evicted() {
    let mut tree = tree(5, 2);
    retain(&mut tree, &[1, 1, 2, 2, 3, 3]);
    retain(&mut tree, &[4, 4]);
    let inserted = tree.insert(&[1, 1, 2, 5, 6, 6, 7, 7], b"").unwrap();
    assert_eq!((inserted.num_matched_tokens, inserted.num_copied_tokens), (2, 1));
    assert_eq!(tree.match_prefix(&[1, 1, 2, 2], b"").chunk_ids[1], inserted.copy.unwrap().src);
    tree.check_invariants().unwrap();
}

#[test]
fn a_cut_needs_no_copy_once_eviction_took_what_hung_on_the_chunk() {
    let mut tree = tree(3, 2);
    retain(&mut tree, &[1, 1, 2, 2, 3, 3]);
    let seq = tree.insert(&[1, 1, 2, 2], b"").unwrap().seq;
    assert_eq!(tree.truncate(seq, 3).unwrap().copy, None);
    assert_eq!(tree.tokens(seq).unwrap(), [1, 1, 2]);
    assert_eq!((tree.stats().num_in_use, tree.stats().num_free), (2, 1));
    tree.check_invariants().unwrap();
}

#[test]
fn the_copy_is_given_up_when_its_source_has_to_go() {
    let mut tree = tree(3, 2);
    retain(&mut tree, &[1, 1, 2, 2]);
    let inserted = tree.insert(&[1, 1, 2, 5, 6, 6], b"").unwrap();
    assert_eq!((inserted.num_matched_tokens, inserted.num_copied_tokens), (2, 0));
    tree.check_invariants().unwrap();
}

#[test]
fn eviction_takes_neither_live_nor_pinned_chunks_nor_those_of_an_open_step() {
    let mut tree = tree(16, 2);
    let live = insert_written(&mut tree, &[1, 1, 2, 2, 3]);
    retain(&mut tree, &[4, 4, 5, 5]);
    tree.pin(&[4, 4], b"", None).unwrap();
    let stepping = tree.insert(&[6, 6, 7, 7], b"").unwrap().seq;
    let step = tree.begin_step(&[(stepping, 4)]).unwrap();
    tree.remove(stepping).unwrap();
    assert_eq!(tree.evict(100), 1);
    assert_eq!(tree.match_prefix(&[4, 4, 5, 5], b"").num_filled, 2);
    assert_eq!(tree.chunk_ids(live).unwrap().len(), 3);
    assert_eq!(tree.match_prefix(&[6, 6, 7, 7], b"").num_tokens, 4);
    tree.commit_step(step.id).unwrap();
    assert_eq!(tree.match_prefix(&[6, 6, 7, 7], b"").num_filled, 4);
    assert_eq!(tree.evict(100), 2);
    tree.check_invariants().unwrap();
}

#[test]
fn eviction_never_strands_a_descendant() {
    let mut tree = tree(16, 2);
    retain(&mut tree, &[1, 1]);
    let live = insert_written(&mut tree, &[1, 1, 2, 2, 3, 3]);
    retain(&mut tree, &[1, 1, 2, 2, 4, 4]);
    assert_eq!(tree.evict(100), 1);
    assert_eq!(tree.match_prefix(&[1, 1, 2, 2, 3, 3], b"").num_filled, 6);
    tree.remove(live).unwrap();
    for left in [2, 1, 0] {
        assert_eq!(tree.evict(1), 1);
        assert_eq!(tree.match_prefix(&[1, 1, 2, 2, 3, 3], b"").num_filled, 2 * left);
        tree.check_invariants().unwrap();
    }
}

#[test]
fn a_prompt_that_can_never_fit_is_refused_with_the_sizes() {
    let mut tree = tree(4, 2);
    retain(&mut tree, &[1, 1, 2, 2]);
    let error = tree.insert(&[9; 9], b"").unwrap_err();
    assert_eq!(error, Error::OutOfChunks { needed: 5, free: 2, evictable: 2, capacity: 4 });
    assert_eq!(tree.match_prefix(&[1, 1, 2, 2], b"").num_filled, 4);
}

#[test]
fn a_prompt_that_does_not_fit_now_changes_nothing() {
    let mut tree = tree(4, 2);
    insert_written(&mut tree, &[1, 1, 2, 2]);
    retain(&mut tree, &[3, 3]);
    let drawing = tree.render();
    let error = tree.insert(&[9; 6], b"new").unwrap_err();
    assert_eq!(error, Error::OutOfChunks { needed: 3, free: 1, evictable: 1, capacity: 4 });
    assert_eq!(tree.render(), drawing);
    tree.check_invariants().unwrap();
}

#[test]
fn a_batch_append_is_all_or_none_and_the_others_go_on() {
    let mut tree = tree(5, 2);
    let seqs = [[1, 1], [2, 2], [3, 3]].map(|tokens| insert_written(&mut tree, &tokens));
    let drawing = tree.render();
    let error = tree.append_batch(&seqs, &[7, 8, 9]).unwrap_err();
    assert_eq!(error, Error::OutOfChunks { needed: 3, free: 2, evictable: 0, capacity: 5 });
    assert_eq!(tree.render(), drawing);
    tree.append_batch(&seqs[..2], &[7, 8]).unwrap();
    tree.append_batch(&seqs[..2], &[7, 8]).unwrap();
    assert_eq!(tree.tokens(seqs[1]).unwrap(), [2, 2, 8, 8]);
    tree.commit(&[(seqs[0], 2), (seqs[1], 2)]).unwrap();
    tree.remove(seqs[0]).unwrap();
    tree.append_batch(&seqs[2..], &[9]).unwrap();
    tree.check_invariants().unwrap();
}

#[test]
fn a_batch_names_each_sequence_once_and_as_many_tokens() {
    let mut tree = tree(5, 2);
    let seq = insert_written(&mut tree, &[1]);
    let error = tree.append_batch(&[seq, seq], &[2, 3]).unwrap_err();
    assert!(error.to_string().starts_with("seqs[1]: "), "{error}");
    let error = tree.append_batch(&[seq], &[2, 3]).unwrap_err();
    assert!(error.to_string().starts_with("tokens: got 2 for 1 sequences"), "{error}");
    let error = tree.append_batch(&[seq, SeqHandle::from(77)], &[2, 3]).unwrap_err();
    assert_eq!(error, Error::UnknownSequence { argument: "seqs[1]".to_owned(), handle: 77 });
    assert_eq!(tree.tokens(seq).unwrap(), [1]);
}

#[test]
fn arguments_out_of_range_are_refused() {
    assert!(PrefixTree::new(TreeConfig::new(4, 0)).is_err());
    assert!(PrefixTree::new(TreeConfig::new(0, 4)).is_err());
    let mut tree = tree(4, 2);
    let error = tree.insert(&[], b"").unwrap_err();
    assert_eq!(error.to_string(), "tokens: got an empty prompt, allowed is 1 token or more");
    let seq = insert_written(&mut tree, &[1, 2, 3]);
    for len in [0, 4] {
        let error = tree.truncate(seq, len).unwrap_err();
        assert_eq!(error.to_string(), format!("num_tokens: got {len}, allowed is 1 to 3"));
    }
}

#[test]
fn a_pin_keeps_the_written_full_chunks_until_it_is_taken_back() {
    let mut tree = tree(16, 4);
    retain(&mut tree, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let pinned = tree.pin(&[1, 2, 3, 4, 5, 6, 7, 8, 9], b"", None).unwrap();
    assert_eq!((pinned.num_tokens, pinned.expires_at), (8, None));
    assert_eq!((tree.stats().num_pinned, tree.stats().num_evictable), (2, 0));
    assert_eq!(tree.clear(), 0);
    tree.unpin(pinned.pin).unwrap();
    assert!(matches!(tree.unpin(pinned.pin), Err(Error::InvalidConfig { .. })));
    assert_eq!(tree.clear(), 2);
}

#[test]
fn a_pin_with_a_time_to_live_ends_by_itself() {
    let (clock, hand) = Clock::manual();
    let mut tree = PrefixTree::new(TreeConfig { clock, ..TreeConfig::new(16, 4) }).unwrap();
    retain(&mut tree, &[1, 2, 3, 4]);
    let pinned = tree.pin(&[1, 2, 3, 4], b"", Some(Duration::from_secs(10))).unwrap();
    hand.advance(Duration::from_secs(9));
    assert_eq!(tree.evict(1), 0);
    hand.advance(Duration::from_secs(1));
    assert_eq!(tree.evict(1), 1);
    assert!(tree.unpin(pinned.pin).is_err());
    tree.check_invariants().unwrap();
}

#[test]
fn what_is_not_cached_cannot_be_pinned() {
    let mut tree = tree(16, 4);
    tree.insert(&[1, 2, 3, 4], b"").unwrap();
    assert!(matches!(tree.pin(&[1, 2, 3, 4], b"", None), Err(Error::InvalidConfig { .. })));
    assert!(tree.pin(&[7], b"unknown", None).is_err());
}

#[test]
fn clear_leaves_what_is_in_use() {
    let mut tree = tree(16, 2);
    let live = insert_written(&mut tree, &[1, 1, 2, 2]);
    retain(&mut tree, &[1, 1, 3, 3]);
    retain(&mut tree, &[5, 5]);
    assert_eq!(tree.clear(), 2);
    assert_eq!(tree.stats().num_in_use, 2);
    assert_eq!(tree.tokens(live).unwrap(), [1, 1, 2, 2]);
    tree.check_invariants().unwrap();
}
