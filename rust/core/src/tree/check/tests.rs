//! Sabotage: each kind of damage to a sound tree is reported under the invariant that it violates.

use super::super::slab::NIL;
use super::super::types::{SeqHandle, TreeConfig};
use super::PrefixTree;

/// A tree with shared, private, duplicate, retained, pinned and unwritten segments, an open step
/// and a waiting fork.
struct Sound {
    tree: PrefixTree,
    /// Wholly written and shared.
    shared: SeqHandle,
    /// Not written.
    unwritten: SeqHandle,
    /// Waits for `unwritten`.
    waiting: SeqHandle,
}

fn sound() -> Sound {
    let mut tree = PrefixTree::new(TreeConfig::new(64, 2)).unwrap();
    let shared = tree.insert(&[1, 2, 3, 4, 5], b"").unwrap().seq;
    let other = tree.insert(&[1, 2, 3, 4, 6, 7, 8], b"").unwrap().seq;
    let gone = tree.insert(&[1, 2, 9, 9, 9, 9], b"").unwrap().seq;
    let pinned = tree.insert(&[20, 21, 22, 23], b"").unwrap().seq;
    tree.commit(&[(shared, 5), (other, 3), (gone, 4), (pinned, 4)]).unwrap();
    tree.remove(gone).unwrap();
    tree.pin(&[20, 21], b"", None).unwrap();
    tree.remove(pinned).unwrap();
    let unwritten = tree.insert(&[1, 30, 31], b"salt").unwrap().seq;
    tree.insert(&[1, 30], b"salt").unwrap();
    let waiting = tree.fork(unwritten).unwrap().seq;
    tree.append(other, &[10]).unwrap();
    tree.begin_step(&[(other, 1)]).unwrap();
    tree.check_invariants().unwrap();
    Sound { tree, shared, unwritten, waiting }
}

/// Damages a sound tree and expects the invariant that reports it.
fn assert_reported(number: u32, sabotage: impl FnOnce(&mut Sound)) {
    let mut sound = sound();
    sabotage(&mut sound);
    let message = sound.tree.check_invariants().expect_err("the damage was not found");
    assert!(message.starts_with(&format!("invariant {number}: ")), "{message}");
}

impl Sound {
    fn leaf(&self, seq: SeqHandle) -> u32 {
        self.tree.sequences[seq.slot()].leaf
    }

    fn parent(&self, seq: SeqHandle) -> u32 {
        self.tree.segments[self.leaf(seq)].parent
    }
}

#[test]
fn a_chunk_in_two_places_is_reported() {
    assert_reported(1, |sound| {
        let chunk = sound.tree.chunks(sound.leaf(sound.shared))[0];
        // Takes the place of a free chunk, so that the totals still agree.
        sound.tree.pool.allocate().unwrap();
        sound.tree.pool.free(chunk);
    });
}

#[test]
fn a_lost_chunk_is_reported() {
    assert_reported(1, |sound| {
        sound.tree.pool.allocate().unwrap();
    });
}

#[test]
fn a_wrong_total_is_reported() {
    assert_reported(2, |sound| sound.tree.accounts.evictable_chunks += 1);
}

#[test]
fn a_stranded_child_is_reported() {
    assert_reported(3, |sound| {
        let parent = sound.parent(sound.shared);
        sound.tree.segments[parent].first_child = NIL;
    });
}

#[test]
fn a_child_of_another_parent_is_reported() {
    assert_reported(3, |sound| {
        let leaf = sound.leaf(sound.shared);
        sound.tree.segments[leaf].parent = sound.leaf(sound.unwritten);
    });
}

#[test]
fn a_shared_partial_chunk_is_reported() {
    assert_reported(4, |sound| {
        let leaf = sound.leaf(sound.shared);
        sound.tree.segments[leaf].live += 1;
    });
}

#[test]
fn overlapping_windows_are_reported() {
    assert_reported(5, |sound| {
        let parent = sound.parent(sound.shared);
        sound.tree.segments[parent].first_chunk += 1;
    });
}

#[test]
fn a_wrong_count_of_sequences_is_reported() {
    assert_reported(6, |sound| {
        let parent = sound.parent(sound.shared);
        sound.tree.segments[parent].live += 1;
    });
}

#[test]
fn a_child_written_before_its_parent_is_reported() {
    assert_reported(7, |sound| {
        let leaf = sound.leaf(sound.unwritten);
        sound.tree.segments[leaf].scheduled = 1;
        sound.tree.segments[leaf].filled = 1;
    });
}

#[test]
fn more_written_than_there_is_is_reported() {
    assert_reported(7, |sound| {
        let leaf = sound.leaf(sound.unwritten);
        sound.tree.segments[leaf].filled = 7;
    });
}

#[test]
fn an_unwritten_chunk_without_a_writer_is_reported() {
    assert_reported(8, |sound| {
        let parent = sound.parent(sound.unwritten);
        sound.tree.segments[parent].writer = NIL;
    });
}

#[test]
fn a_live_segment_in_the_eviction_list_is_reported() {
    assert_reported(9, |sound| {
        let leaf = sound.leaf(sound.shared);
        sound.tree.lru_push(leaf);
    });
}

#[test]
fn a_retained_segment_that_cannot_be_evicted_is_reported() {
    assert_reported(9, |sound| {
        let head = sound.tree.lru.head;
        sound.tree.lru_remove(head);
    });
}

#[test]
fn a_retained_segment_that_cannot_be_found_is_reported() {
    assert_reported(10, |sound| {
        let head = sound.tree.lru.head;
        sound.tree.unindex_first_chunk(head);
    });
}

#[test]
fn a_retained_chunk_that_is_not_written_is_reported() {
    assert_reported(8, |sound| {
        let head = sound.tree.lru.head;
        sound.tree.segments[head].filled = 0;
        sound.tree.segments[head].scheduled = 0;
    });
}

#[test]
fn changed_tokens_are_reported() {
    assert_reported(11, |sound| {
        let parent = sound.parent(sound.shared);
        let run = sound.tree.segments[parent].run;
        let at = sound.tree.segments[parent].first_chunk as usize * 2 + 1;
        sound.tree.runs[run].tokens[at] = 77;
    });
}

#[test]
fn a_missing_table_entry_is_reported() {
    assert_reported(11, |sound| {
        let parent = sound.parent(sound.shared);
        sound.tree.unindex_first_chunk(parent);
        sound.tree.segments[parent].indexed = true;
    });
}

#[test]
fn a_child_outside_of_its_chain_is_reported() {
    assert_reported(12, |sound| {
        let leaf = sound.leaf(sound.shared);
        sound.tree.unchain(leaf);
    });
}

#[test]
fn a_cursor_past_unwritten_tokens_is_reported() {
    assert_reported(13, |sound| {
        let slot = sound.unwritten.slot();
        sound.tree.sequences[slot].computed = 2;
        sound.tree.sequences[slot].scheduled = 2;
    });
}

#[test]
fn a_sequence_that_ends_elsewhere_is_reported() {
    assert_reported(13, |sound| {
        let slot = sound.shared.slot();
        sound.tree.sequences[slot].leaf = sound.leaf(sound.unwritten);
    });
}

#[test]
fn scheduled_tokens_of_no_step_are_reported() {
    assert_reported(14, |sound| {
        let parent = sound.parent(sound.unwritten);
        sound.tree.segments[parent].scheduled = 2;
    });
}

#[test]
fn a_forgotten_open_step_is_reported() {
    assert_reported(14, |sound| {
        let slot = sound.shared.slot();
        sound.tree.sequences[slot].open_steps = 1;
    });
}

#[test]
fn a_wait_for_a_sequence_that_does_not_know_is_reported() {
    assert_reported(15, |sound| {
        let slot = sound.waiting.slot();
        sound.tree.sequences[slot].wait_source = sound.shared.slot();
    });
}

#[test]
fn a_pin_that_ends_nowhere_is_reported() {
    assert_reported(16, |sound| {
        sound.tree.pins.slots[0].segment = sound.leaf(sound.shared);
    });
}

#[test]
fn a_namespace_under_another_salt_is_reported() {
    assert_reported(17, |sound| {
        for namespace in sound.tree.namespaces.iter_mut() {
            namespace.salt = b"other".as_slice().into();
        }
    });
}

#[test]
fn a_shared_segment_without_sharing_is_reported() {
    assert_reported(18, |sound| sound.tree.sharing = false);
}
