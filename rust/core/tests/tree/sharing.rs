//! What is shared, what is copied and what is computed.

use chunkcache::error::Error;
use chunkcache::tree::{CopyChunk, PrefixTree, TreeConfig};

use crate::support::{insert_written, numbers, tree};

#[test]
fn a_wholly_cached_multiple_of_the_chunk_leaves_one_token_and_writes_nothing() {
    let mut tree = tree(16, 4);
    let first = insert_written(&mut tree, &numbers(8));
    let second = tree.insert(&numbers(8), b"").unwrap();
    assert_eq!((second.num_matched_tokens, second.num_copied_tokens), (8, 0));
    assert_eq!(second.num_computed_tokens, 7);
    assert_eq!(tree.chunk_ids(second.seq), tree.chunk_ids(first));
    let step = tree.begin_step(&[(second.seq, 1)]).unwrap();
    assert_eq!((step.rows[0].start, step.rows[0].len, step.rows[0].num_cached_rows), (7, 1, 1));
    tree.commit_step(step.id).unwrap();
    assert_eq!(tree.sequence(second.seq).unwrap().num_computed_tokens, 8);
    tree.check_invariants().unwrap();
}

#[test]
fn a_wholly_cached_prompt_with_a_partial_chunk_leaves_one_token() {
    let mut tree = tree(16, 4);
    let first = insert_written(&mut tree, &numbers(10));
    let second = tree.insert(&numbers(10), b"").unwrap();
    assert_eq!((second.num_matched_tokens, second.num_copied_tokens), (8, 2));
    assert_eq!(second.num_computed_tokens, 9);
    let (src, dst) = (tree.chunk_ids(first).unwrap()[2], tree.chunk_ids(second.seq).unwrap()[2]);
    assert_eq!(second.copy, Some(CopyChunk { src, dst, num_tokens: 2 }));
    assert_ne!(src, dst);
    let step = tree.begin_step(&[(second.seq, 1)]).unwrap();
    assert_eq!(step.rows[0].num_cached_rows, 1);
}

#[test]
fn the_longest_equal_head_of_a_chunk_is_copied() {
    let mut tree = tree(32, 8);
    insert_written(&mut tree, &[1, 2, 3, 9, 9, 9, 9, 9, 9]);
    let best = insert_written(&mut tree, &[1, 2, 3, 4, 5, 8, 8, 8, 8]);
    insert_written(&mut tree, &[1, 2, 7, 7, 7]);
    let inserted = tree.insert(&[1, 2, 3, 4, 5, 6], b"").unwrap();
    assert_eq!(inserted.num_copied_tokens, 5);
    assert_eq!(inserted.copy.unwrap().src, tree.chunk_ids(best).unwrap()[0]);
}

#[test]
fn a_head_that_is_not_written_is_computed_again() {
    let mut tree = tree(16, 8);
    let first = tree.insert(&[1, 2, 3, 4, 5], b"").unwrap().seq;
    tree.commit(&[(first, 2)]).unwrap();
    let second = tree.insert(&[1, 2, 3, 4, 9], b"").unwrap();
    assert_eq!((second.num_copied_tokens, second.num_computed_tokens), (2, 2));
}

#[test]
fn a_long_prompt_is_matched_over_many_turns() {
    let mut tree = tree(100, 4);
    let mut conversation = Vec::new();
    for turn in 0..10 {
        conversation.extend([100 + turn, 1, 2, 3, 4]);
        let inserted = tree.insert(&conversation, b"").unwrap();
        let left = conversation.len() - inserted.num_computed_tokens;
        tree.commit(&[(inserted.seq, left as u32)]).unwrap();
        tree.append(inserted.seq, &[turn]).unwrap();
        conversation.push(turn);
        tree.commit(&[(inserted.seq, 1)]).unwrap();
        tree.remove(inserted.seq).unwrap();
        tree.check_invariants().unwrap();
        let matched = tree.match_prefix(&conversation, b"");
        assert_eq!(matched.num_tokens, conversation.len() / 4 * 4);
        assert_eq!(matched.num_filled, matched.num_tokens);
    }
    assert_eq!(tree.stats().num_segments, 1);
}

#[test]
fn equal_prompts_arriving_together_store_and_compute_their_full_chunks_once() {
    for (count, len) in [(2, 10), (50, 10), (2, 12), (50, 12)] {
        let mut tree = tree(200, 4);
        let prompts: Vec<_> =
            (0..count).map(|_| tree.insert(&numbers(len), b"").unwrap()).collect();
        let full = len / 4 * 4;
        for prompt in &prompts[1..] {
            assert_eq!(prompt.num_matched_tokens, full as usize);
            assert_eq!(prompt.num_computed_tokens as u32, full.min(len - 1));
        }
        let tails = if len % 4 == 0 { 0 } else { count as usize };
        assert_eq!(tree.stats().num_in_use, (full / 4) as usize + tails);
        let batch: Vec<_> = prompts
            .iter()
            .rev()
            .map(|prompt| (prompt.seq, len - prompt.num_computed_tokens as u32))
            .collect();
        let step = tree.begin_step(&batch).unwrap();
        let written: u32 = step.rows.iter().map(|row| row.len - row.num_cached_rows).sum();
        assert_eq!(written, full + count as u32 * (len - full));
        tree.commit_step(step.id).unwrap();
        tree.check_invariants().unwrap();
    }
}

#[test]
fn a_sequence_is_not_ready_before_its_prefix_is_written() {
    let mut tree = tree(16, 4);
    let first = tree.insert(&numbers(10), b"").unwrap().seq;
    let second = tree.insert(&numbers(10), b"").unwrap().seq;
    assert!(!tree.sequence(second).unwrap().is_ready);
    let error = tree.begin_step(&[(second, 2)]).unwrap_err();
    assert!(matches!(error, Error::InvalidConfig { .. }), "{error}");
    tree.begin_step(&[(first, 8)]).unwrap();
    assert!(tree.sequence(second).unwrap().is_ready);
}

#[test]
fn the_oldest_sharer_inherits_when_the_writer_is_cancelled_half_way() {
    let mut tree = tree(200, 4);
    let prompts: Vec<_> = (0..50).map(|_| tree.insert(&numbers(18), b"").unwrap().seq).collect();
    tree.commit(&[(prompts[0], 6)]).unwrap();
    let inherited = tree.remove(prompts[0]).unwrap();
    assert_eq!(inherited.len(), 1);
    assert_eq!((inherited[0].seq, inherited[0].begin, inherited[0].end), (prompts[1], 6, 16));
    assert_eq!(tree.sequence(prompts[1]).unwrap().num_computed_tokens, 6);
    let batch: Vec<_> = prompts[1..]
        .iter()
        .map(|&seq| (seq, 18 - tree.sequence(seq).unwrap().num_computed_tokens as u32))
        .collect();
    tree.commit(&batch).unwrap();
    let matched = tree.match_prefix(&numbers(18), b"");
    assert_eq!((matched.num_tokens, matched.num_filled, matched.num_partial), (16, 16, 2));
    tree.check_invariants().unwrap();
}

#[test]
fn unwritten_chunks_without_a_sharer_are_freed() {
    let mut tree = tree(16, 4);
    let first = tree.insert(&numbers(16), b"").unwrap().seq;
    tree.commit(&[(first, 6)]).unwrap();
    assert!(tree.remove(first).unwrap().is_empty());
    let stats = tree.stats();
    assert_eq!((stats.num_evictable, stats.num_in_use, stats.num_free), (1, 0, 15));
}

#[test]
fn a_fork_that_diverges_sees_none_of_its_source() {
    let mut tree = tree(16, 4);
    let source = insert_written(&mut tree, &numbers(6));
    let forked = tree.fork(source).unwrap();
    assert_eq!(forked.copy.unwrap().num_tokens, 2);
    tree.append(source, &[70, 71, 72]).unwrap();
    tree.append(forked.seq, &[80, 81, 82]).unwrap();
    assert_eq!(tree.tokens(source).unwrap(), [0, 1, 2, 3, 4, 5, 70, 71, 72]);
    assert_eq!(tree.tokens(forked.seq).unwrap(), [0, 1, 2, 3, 4, 5, 80, 81, 82]);
    let (a, b) = (tree.chunk_ids(source).unwrap(), tree.chunk_ids(forked.seq).unwrap());
    assert_eq!(a[0], b[0]);
    assert!(a[1..].iter().all(|chunk| !b[1..].contains(chunk)));
}

#[test]
fn a_fork_of_an_unwritten_chunk_waits_for_it() {
    let mut tree = tree(16, 4);
    let source = tree.insert(&numbers(6), b"").unwrap().seq;
    let forked = tree.fork(source).unwrap();
    assert!(forked.waiting && forked.copy.is_none());
    assert!(tree.begin_step(&[(source, 6), (forked.seq, 1)]).is_err());
    let committed = tree.commit(&[(source, 6)]).unwrap();
    let (src, dst) = (tree.chunk_ids(source).unwrap()[1], tree.chunk_ids(forked.seq).unwrap()[1]);
    assert_eq!(committed.copies, [CopyChunk { src, dst, num_tokens: 2 }]);
    let info = tree.sequence(forked.seq).unwrap();
    assert_eq!((info.num_computed_tokens, info.is_waiting), (6, false));
    tree.append(forked.seq, &[9]).unwrap();
    tree.commit(&[(forked.seq, 1)]).unwrap();
}

#[test]
fn a_waiting_fork_computes_for_itself_when_its_source_leaves() {
    let mut tree = tree(16, 4);
    let source = tree.insert(&numbers(6), b"").unwrap().seq;
    let forked = tree.fork(source).unwrap().seq;
    let inherited = tree.remove(source).unwrap();
    assert_eq!((inherited[0].seq, inherited[0].begin, inherited[0].end), (forked, 0, 6));
    tree.commit(&[(forked, 6)]).unwrap();
    tree.check_invariants().unwrap();
}

#[test]
fn truncation_into_a_shared_chunk_copies() {
    let mut tree = tree(16, 4);
    let first = insert_written(&mut tree, &numbers(8));
    let second = tree.insert(&numbers(8), b"").unwrap().seq;
    let truncated = tree.truncate(second, 6).unwrap();
    let (src, dst) = (tree.chunk_ids(first).unwrap()[1], tree.chunk_ids(second).unwrap()[1]);
    assert_eq!(truncated.copy, Some(CopyChunk { src, dst, num_tokens: 2 }));
    assert_ne!(src, dst);
    assert_eq!(tree.tokens(first).unwrap(), numbers(8));
    assert_eq!(tree.tokens(second).unwrap(), numbers(6));
    tree.check_invariants().unwrap();
}

#[test]
fn truncation_of_a_private_chunk_cuts_in_place() {
    let mut tree = tree(16, 4);
    let seq = insert_written(&mut tree, &numbers(11));
    let before = tree.chunk_ids(seq).unwrap();
    assert_eq!(tree.truncate(seq, 6).unwrap(), Default::default());
    assert_eq!(tree.chunk_ids(seq).unwrap(), before[..2]);
    assert_eq!(tree.stats().num_free, 14);
    assert_eq!(tree.sequence(seq).unwrap().num_computed_tokens, 6);
}

#[test]
fn a_chunk_that_a_retained_child_or_a_pin_needs_is_not_cut() {
    let mut tree = tree(16, 4);
    let long = insert_written(&mut tree, &numbers(12));
    let short = tree.insert(&numbers(8), b"").unwrap().seq;
    tree.remove(long).unwrap();
    assert!(tree.truncate(short, 7).unwrap().copy.is_some());
    assert_eq!(tree.match_prefix(&numbers(12), b"").num_filled, 12);
    let pinned = insert_written(&mut tree, &[50, 51, 52, 53]);
    tree.pin(&[50, 51, 52, 53], b"", None).unwrap();
    assert!(tree.truncate(pinned, 3).unwrap().copy.is_some());
    tree.check_invariants().unwrap();
}

#[test]
fn leaves_that_fill_with_equal_tokens_are_one_after_removal() {
    let mut tree = tree(32, 4);
    let source = insert_written(&mut tree, &numbers(5));
    let forked = tree.fork(source).unwrap().seq;
    for seq in [source, forked] {
        tree.append(seq, &[5, 6, 7, 8, 9, 10, 11]).unwrap();
        tree.commit(&[(seq, 7)]).unwrap();
    }
    assert_eq!(tree.stats().num_in_use, 5);
    tree.remove(source).unwrap();
    tree.remove(forked).unwrap();
    assert_eq!(tree.stats().num_evictable, 3);
    assert_eq!(tree.match_prefix(&numbers(12), b"").num_filled, 12);
    tree.check_invariants().unwrap();
}

#[test]
fn a_duplicate_is_matched_once_the_first_one_is_evicted() {
    let mut tree = tree(16, 4);
    let first = insert_written(&mut tree, &[1, 2, 3, 4]);
    let second = insert_written(&mut tree, &[1, 2, 3]);
    tree.append(second, &[4]).unwrap();
    tree.commit(&[(second, 1)]).unwrap();
    assert_ne!(tree.chunk_ids(first), tree.chunk_ids(second));
    tree.remove(first).unwrap();
    assert_eq!(tree.evict(1), 1);
    tree.check_invariants().unwrap();
    let found = tree.match_prefix(&[1, 2, 3, 4, 5], b"");
    assert_eq!(found.num_tokens, 4);
    assert_eq!(Ok(found.chunk_ids), tree.chunk_ids(second));
}

#[test]
fn what_hangs_below_a_duplicate_moves_to_the_first_one() {
    let mut tree = tree(32, 2);
    let source = insert_written(&mut tree, &[1, 2, 3]);
    let forked = tree.fork(source).unwrap().seq;
    for (seq, rest) in [(source, [4, 5, 6]), (forked, [4, 7, 8])] {
        tree.append(seq, &rest).unwrap();
        tree.commit(&[(seq, 3)]).unwrap();
    }
    tree.remove(source).unwrap();
    tree.remove(forked).unwrap();
    assert_eq!(tree.match_prefix(&[1, 2, 3, 4, 5, 6], b"").num_filled, 6);
    assert_eq!(tree.match_prefix(&[1, 2, 3, 4, 7, 8], b"").num_filled, 6);
    assert_eq!(tree.stats().num_evictable, 4);
    tree.check_invariants().unwrap();
}

#[test]
fn a_duplicate_of_several_segments_is_freed_wholly() {
    let mut tree = tree(32, 2);
    let source = insert_written(&mut tree, &[1, 2, 3]);
    let forked = tree.fork(source).unwrap().seq;
    for seq in [forked, source] {
        tree.append(seq, &[4, 5, 6]).unwrap();
        tree.commit(&[(seq, 3)]).unwrap();
    }
    insert_written(&mut tree, &[1, 2, 3, 4]);
    tree.remove(source).unwrap();
    tree.check_invariants().unwrap();
    assert_eq!(tree.stats().num_in_use, 3);
}

#[test]
fn a_chunk_that_fills_token_by_token_is_matched() {
    let mut tree = tree(16, 4);
    let seq = insert_written(&mut tree, &[1, 2]);
    for token in [3, 4] {
        assert_eq!(tree.match_prefix(&[1, 2, 3, 4], b"").num_tokens, 0);
        tree.append_batch(&[seq], &[token]).unwrap();
    }
    let matched = tree.match_prefix(&[1, 2, 3, 4], b"");
    assert_eq!((matched.num_tokens, matched.num_filled), (4, 2));
}

#[test]
fn a_reserved_slot_is_not_matched_until_its_token_is_known() {
    let mut tree = tree(16, 4);
    let seq = insert_written(&mut tree, &[1, 2, 3]);
    tree.reserve(&[seq]).unwrap();
    tree.commit(&[(seq, 1)]).unwrap();
    // Whatever id an unknown slot is stored with, it must not match.
    for guess in [0, 4, u32::MAX] {
        assert_eq!(tree.match_prefix(&[1, 2, 3, guess, 9], b"").num_tokens, 0);
    }
    assert_eq!(tree.tokens(seq).unwrap(), [1, 2, 3]);
    tree.append(seq, &[4]).unwrap();
    assert_eq!(tree.match_prefix(&[1, 2, 3, 4, 9], b"").num_filled, 4);
    assert_eq!(tree.sequence(seq).unwrap().num_tokens, 4);
}

#[test]
fn a_reserved_slot_is_taken_back() {
    let mut tree = tree(16, 4);
    let seq = insert_written(&mut tree, &numbers(4));
    tree.reserve(&[seq]).unwrap();
    tree.reserve(&[seq]).unwrap();
    assert_eq!(tree.stats().num_in_use, 2);
    tree.cancel_reserved(seq).unwrap();
    tree.cancel_reserved(seq).unwrap();
    assert_eq!(tree.stats().num_in_use, 1);
    assert!(matches!(tree.cancel_reserved(seq), Err(Error::InvalidConfig { .. })));
    tree.check_invariants().unwrap();
}

#[test]
fn namespaces_never_hit_each_other() {
    let mut tree = tree(32, 2);
    let tokens = [98, 99, 100, 101];
    for (salt, tokens) in [(b"a".as_slice(), &tokens[..]), (b"ab", &tokens[1..]), (b"", &tokens)] {
        let inserted = tree.insert(tokens, salt).unwrap();
        assert_eq!(inserted.cached_tokens(), 0);
        tree.commit(&[(inserted.seq, tokens.len() as u32)]).unwrap();
    }
    assert_eq!(tree.match_prefix(&tokens, b"b").num_tokens, 0);
    assert_eq!(tree.match_prefix(&tokens, b"ab").num_partial, 0);
    assert_eq!(tree.match_prefix(&tokens, b"a").num_tokens, 4);
}

#[test]
fn the_smallest_and_largest_token_ids_work() {
    let mut tree = tree(16, 2);
    let seq = insert_written(&mut tree, &[0, u32::MAX, u32::MAX, 0]);
    tree.append(seq, &[u32::MAX, 0]).unwrap();
    assert_eq!(tree.match_prefix(&[0, u32::MAX, u32::MAX, 0], b"").num_filled, 4);
    assert_eq!(tree.match_prefix(&[u32::MAX, 0], b"").num_tokens, 0);
    assert_eq!(tree.tokens(seq).unwrap(), [0, u32::MAX, u32::MAX, 0, u32::MAX, 0]);
}

#[test]
fn tokens_that_agree_in_their_low_byte_differ() {
    let mut tree = tree(16, 2);
    insert_written(&mut tree, &[65, 65]);
    let matched = tree.match_prefix(&[321, 321], b"");
    assert_eq!((matched.num_tokens, matched.num_partial), (0, 0));
}

#[test]
fn without_prefix_sharing_nothing_is_shared_or_retained() {
    let config = TreeConfig { enable_prefix_sharing: false, ..TreeConfig::new(16, 4) };
    let mut tree = PrefixTree::new(config).unwrap();
    let first = insert_written(&mut tree, &numbers(8));
    let second = tree.insert(&numbers(8), b"").unwrap();
    assert_eq!(second.cached_tokens(), 0);
    assert_eq!(tree.stats().num_in_use, 4);
    assert!(matches!(tree.fork(first), Err(Error::InvalidConfig { .. })));
    tree.remove(first).unwrap();
    assert_eq!(tree.stats().num_free, 14);
}

#[test]
fn a_chain_of_a_million_chunks_is_inserted_matched_and_dropped() {
    let mut tree = tree(1_000_001, 1);
    let tokens = numbers(1_000_000);
    let seq = insert_written(&mut tree, &tokens);
    assert_eq!(tree.match_prefix(&tokens, b"").num_filled, 1_000_000);
    tree.remove(seq).unwrap();
    assert_eq!(tree.evict(10), 10);
    assert_eq!(tree.match_prefix(&tokens, b"").num_filled, 999_990);
    drop(tree);
}

#[test]
fn a_chain_of_many_segments_is_matched_evicted_and_dropped() {
    let mut tree = tree(40_000, 1);
    let tokens = numbers(10_000);
    // A branch at every hundredth token keeps the segments apart.
    for end in (100..=10_000).step_by(100) {
        let seq = insert_written(&mut tree, &tokens[..end]);
        tree.append(seq, &[u32::MAX]).unwrap();
        tree.commit(&[(seq, 1)]).unwrap();
        tree.remove(seq).unwrap();
    }
    assert!(tree.stats().num_segments > 190);
    assert_eq!(tree.match_prefix(&tokens, b"").num_filled, 10_000);
    tree.check_invariants().unwrap();
    tree.clear();
    tree.check_invariants().unwrap();
    assert_eq!(tree.stats().num_free, 40_000);
}

#[test]
fn the_drawing_shows_each_segment() {
    let mut tree = tree(16, 2);
    let seq = insert_written(&mut tree, &[1, 2, 3]);
    tree.fork(seq).unwrap();
    let drawing = tree.render();
    assert_eq!(drawing.lines().count(), 2 + 3, "{drawing}");
    assert!(drawing.contains("[0, 2) 1 chunk (1 2), 2 live"), "{drawing}");
}
